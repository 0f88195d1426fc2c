// How buckets are averaged: by collectives, by a communication hook, or with a graph.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/functional.h"
#include "parallel/gradients/gradient_reducer_impl.h"

namespace muster::parallel {
namespace {

// The sparse gradient of a parameter that was not used.
at::Tensor no_rows(const at::Tensor& parameter) {
  std::vector<int64_t> values = parameter.sizes().vec();
  values.at(0) = 0;
  const auto options = parameter.options().requires_grad(false);
  return at::sparse_coo_tensor(at::empty({1, 0}, options.dtype(at::kLong)), at::empty(values, options),
                               parameter.sizes());
}

// A constant as a function of the parameters, whose derivative is zero: so its backward() reaches them, as on other
// ranks.
struct ConstantIn final : torch::autograd::Function<ConstantIn> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& /*parameters*/,
                            const at::Tensor& value) {
    return value.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {at::zeros_like(gradients[0]), at::Tensor()};
  }
};

// Whether all of its bytes are 0, and on the CPU, where looking for another one costs less than adding zeros.
bool has_zero_bytes(const at::Tensor& tensor) {
  if (!tensor.is_cpu() || tensor.layout() != at::kStrided || !tensor.is_non_overlapping_and_dense()) return false;
  const size_t bytes = tensor.nbytes();
  const auto* const first = static_cast<const char*>(tensor.const_data_ptr());
  return bytes == 0 || (*first == 0 && std::memcmp(first, first + 1, bytes - 1) == 0);
}

}  // namespace

void GradientReducer::add_gradients(const std::vector<at::Tensor>& given, std::vector<float> shares,
                                    const std::function<void(const at::Tensor& bucket)>& reduce) {
  end_failed_backward();
  const at::NoGradGuard no_grad;
  Impl& s = *impl_;
  s.times = {};  // forwards and backwards of shards alternate
  for (const Parameter& parameter : s.parameters)
    if (parameter.used && parameter.tensor.grad().defined())
      throw InvalidArgument(text("the gradient of ", parameter.name, " is a sum of no_sync() that is not averaged yet"),
                            "Average it by a backward() outside of no_sync(), or call zero_grad()");
  std::vector<at::Tensor> before;
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    Parameter& parameter = s.parameters[i];
    const at::Tensor& grad = parameter.tensor.grad();
    before.push_back(grad.defined() ? grad.clone() : grad);
    if (!parameter.view.defined()) give_block(s.buckets[parameter.bucket], parameter, s.blocks);
    if (given[i].defined())
      parameter.view.copy_(given[i]);
    else
      parameter.view.zero_();
  }
  for (const Bucket& bucket : s.buckets) reduce(bucket.gradients());
  s.averages_among = s.options.group;
  s.average_shares(shares);
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    Parameter& parameter = s.parameters[i];
    parameter.used = false;
    if (shares[i] > 0 && before[i].defined()) parameter.view.add_(before[i]);
    parameter.tensor.mutable_grad() = shares[i] > 0 ? parameter.view : before[i];
  }
  s.options.on_averaged(/*is_complete=*/true);
  if (!complete(shares) && !s.options.find_unused_parameters) s.report_unused(shares, "shards");
}

// The last bucket is not launched here: it is complete only when backward is nearly over, so finish_backward() reduces
// it, and needs no other thread for that.
void GradientReducer::Impl::launch_ready_buckets() {
  while (next_bucket + 1 < buckets.size() && buckets[next_bucket].pending == 0) launch(next_bucket++);
}

void GradientReducer::Impl::launch(size_t index) {
  begin_communication();
  Bucket& bucket = buckets[index];
  if (bucket.sparse) {
    bucket.works = {all_reduce_async(parameters[bucket.parameters[0]].view, averaging(bucket))};
    return;
  }
  if (hook) return call_hook(index);
  if (!tells_shares_apart()) mark_used(bucket);
  if (!to_owner())
    bucket.works = {all_reduce_async(bucket.flat, averaging(bucket))};
  else if (bucket.owner != kRanksOfParts)
    bucket.works = {reduce_async(bucket.flat, bucket.owner, averaging(bucket))};
  else
    for (const Rows& rows : parameters[bucket.parameters[0]].parts)
      bucket.works.push_back(
          reduce_async(bucket.flat.narrow(0, rows.range.offset, rows.range.elements), rows.owner, averaging(bucket)));
  if (will_be_freed(bucket)) bytes_in_flight += parameters[bucket.parameters[0]].tensor.nbytes();
}

// Waits for it. Takes what this rank owns of a parameter in parts: in the parameter's block, which is then in use as
// long as the user has such a gradient; or as a copy, if the block is to serve gradients of other parameters as well.
// Not as views: optimizers call detach_() on gradients, which views refuse.
void GradientReducer::Impl::end_reduction(Bucket& bucket) {
  bucket.wait();
  Parameter& first = parameters[bucket.parameters[0]];
  if (!first.view.defined() || first.parts.empty()) return;
  const bool is_only_one =
      std::count_if(buckets.begin(), buckets.end(), [&](const Bucket& other) {
        return other.large && parameters[other.parameters[0]].tensor.nbytes() == first.tensor.nbytes();
      }) == 1;
  const GradientBlocks::Pause no_gradients;
  for (Rows& rows : first.parts) {
    if (rows.owner != options.group.rank()) continue;
    const at::Tensor part = rows.range.of(first.view);
    rows.average =
        is_only_one
            ? at::empty({0}, part.options()).set_(part.storage(), part.storage_offset(), part.sizes(), part.strides())
            : part.clone();
  }
}

// For a parameter that this backward() has not made ready, unless an earlier one, in no_sync(), left a gradient.
void GradientReducer::Impl::give_zeros(Parameter& parameter) {
  if (parameter.tensor.grad().defined()) {
    if (!parameter.used && !sharded()) parameter.unused = parameter.tensor.grad().clone();
    adopt(parameter);
    return;
  }
  parameter.used = false;  // what no_sync() left has been discarded since
  if (parameter.sparse) {
    parameter.view = no_rows(parameter.tensor);
    return;
  }
  if (!parameter.view.defined()) give_block(buckets[parameter.bucket], parameter, blocks);
  parameter.view.zero_();
}

// What this rank says of a parameter to all: whether it has used it. A negative number makes the sum of all ranks
// negative: with static_graph, this rank got another number of gradients than in the first backward().
float GradientReducer::Impl::mark_of(const Parameter& parameter) const {
  if (knows_graph && dirty && !keeps_graph && parameter.gradients != parameter.expected)
    return -static_cast<float>(options.group.size());
  return parameter.used ? 1 : 0;
}
void GradientReducer::Impl::mark_used(Bucket& bucket) const {
  std::vector<float> marks;
  for (const size_t index : bucket.parameters) marks.push_back(mark_of(parameters[index]));
  if (has_another_graph) marks[0] = mark_of_another_graph();
  bucket.used.copy_(at::from_blob(marks.data(), {static_cast<int64_t>(marks.size())}, at::kFloat));
}

// Reduces the buckets that are not reduced yet, and waits for all. Every rank reduces every bucket in every backward(),
// whatever happens in it, so that the ranks' collectives stay in step; parameters without a gradient contribute zeros.
// Returns the share of the ranks that reached each parameter.
std::vector<float> GradientReducer::Impl::reduce_the_rest() {
  const at::NoGradGuard no_grad;
  times.all_gradients = Clock::now();
  for (auto& parameter : parameters)
    if (!parameter.ready && parameter.bucket >= next_bucket) give_zeros(parameter);
  for (auto& bucket : buckets) bucket.pending = 0;
  launch_ready_buckets();
  Bucket& last = buckets.back();
  begin_communication();
  if (!tells_shares_apart()) mark_used(last);
  if (hook || last.sparse || last.owner == kRanksOfParts) {
    if (next_bucket < buckets.size()) launch(next_bucket++);  // else its hook has thrown
  } else if (to_owner()) {
    reduce(last.flat, last.owner, averaging(last));
  } else {
    all_reduce(last.flat, averaging(last));
  }
  if (hook) wrong_results = use_hooks_results();
  if (tells_shares_apart()) {
    std::vector<float> shares = shares_used_on_all_ranks();
    for (auto& bucket : buckets) end_reduction(bucket);
    return shares;
  }
  std::vector<float> shares(parameters.size());
  for (auto& bucket : buckets) {
    bucket.wait();
    const std::vector<float> of_bucket = shares_used(bucket);
    for (size_t i = 0; i < of_bucket.size(); ++i) shares[bucket.parameters[i]] = of_bucket[i];
  }
  return shares;
}

// Calls the hook, and then the next step of earlier buckets' futures: on all ranks in the same order.
void GradientReducer::Impl::call_hook(size_t index) {
  const at::NoGradGuard no_grad;
  const Bucket& of = buckets[index];
  std::vector<GradBucket::Place> places;
  for (const size_t i : of.parameters) {
    const Parameter& p = parameters[i];
    places.push_back({.name = p.name, .parameter = p.tensor, .offset = p.offset, .strides = p.view.strides().vec()});
  }
  const auto is_dense = [](const Bucket& bucket) { return !bucket.sparse; };
  const auto at = buckets.begin() + static_cast<std::ptrdiff_t>(index);
  const auto before = static_cast<size_t>(std::count_if(buckets.begin(), at, is_dense)),
             after = static_cast<size_t>(std::count_if(at, buckets.end(), is_dense));
  GradBucket bucket(before, before + after, of.gradients(), std::move(places), options.group, heap, scale());
  const GradientBlocks::Pause no_gradients;
  buckets[index].future = hook(bucket);
  averages_among = bucket.averages_among();
  for (size_t i = 0; i < index; ++i)
    if (buckets[i].future) buckets[i].future->go_on();
}

// Returns what is wrong with them, which finish_backward() throws when all collectives are over.
std::string GradientReducer::Impl::use_hooks_results() {
  const GradientBlocks::Pause no_gradients;
  std::string wrong;
  for (Bucket& bucket : buckets) {
    if (!bucket.future) continue;
    HookFuture future = *std::exchange(bucket.future, std::nullopt);  // it ends here, also if it throws
    const at::Tensor result = future.get();
    const at::Tensor buffer = bucket.gradients();
    if (!result.defined() || result.numel() != buffer.numel()) {
      wrong = text("the communication hook, for the bucket that begins with parameter ",
                   parameters[bucket.parameters[0]].name, ": expected a tensor of ", buffer.numel(), " elements, got ",
                   result.defined() ? text("one of ", result.numel()) : std::string("no tensor"));
      continue;
    }
    if (result.const_data_ptr() != buffer.const_data_ptr()) buffer.copy_(result.reshape({-1}));
  }
  return wrong;
}

// Returns when every rank has come here. With owners, buckets tell only their owners, and may be freed by now.
std::vector<float> GradientReducer::Impl::shares_used_on_all_ranks() {
  std::vector<float> shares;
  for (const auto& parameter : parameters) shares.push_back(mark_of(parameter));
  average_shares(shares);
  return shares;
}
void GradientReducer::Impl::average_shares(std::vector<float>& shares) const {
  if (!averages_among) return;
  all_reduce(at::from_blob(shares.data(), {static_cast<int64_t>(shares.size())}, at::kFloat),
             {.op = ReduceOp::AVG, .group = *averages_among});
}

// The share of the ranks with data that reached each parameter.
std::vector<float> GradientReducer::Impl::of_contributors(std::vector<float> shares) const {
  const int n = options.group.size();
  if (!lacks_contributors()) {
    if (contributors != n) shares.assign(shares.size(), 1);  // which ranks have used what is not known
    return shares;
  }
  for (float& share : shares) share = std::round(share * static_cast<float>(n)) / static_cast<float>(contributors);
  return shares;
}

// Averages that the user has not cleared: this backward() is to add to them, after its own are known. Zeros, as
// zero_grad() may leave them, need not be kept, and the new gradients can have their memory.
void GradientReducer::Impl::put_averages_aside() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters) {
    for (Rows& rows : parameter.parts) {
      at::Tensor& own = rows.tensor.mutable_grad();
      rows.had_zeros = synced && own.defined() && has_zero_bytes(own);
      if (rows.had_zeros) own = at::Tensor();
    }
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!parameter.has_average()) {
      parameter.average.reset();  // a gradient that comes now may get the same place
      continue;
    }
    if (!synced)
      throw InvalidArgument(text("backward() in no_sync() would add to the gradient of ", parameter.name,
                                 ", which is an average that only rank ", options.group.global_rank(parameter.owner),
                                 options.owner_on_each_host ? " has on this host" : " has"),
                            "Call zero_grad() with set_to_none before, or do not use no_sync() for this backward()");
    parameter.average.reset();
    Bucket& bucket = buckets[parameter.bucket];
    parameter.had_zeros = has_zero_bytes(grad);
    if (!parameter.had_zeros) parameter.kept = bucket.large ? grad : grad.clone();
    grad = at::Tensor();
    if (bucket.large) release_block(bucket, parameter);
  }
}

// Sets each .grad to the average, where it is to be kept.
void GradientReducer::Impl::use_averages(const std::vector<float>& shares) {
  for (size_t i = 0; i < shares.size(); ++i) {
    Parameter& parameter = parameters[i];
    at::Tensor& grad = parameter.tensor.mutable_grad();
    at::Tensor kept = std::exchange(parameter.kept, at::Tensor());
    const at::Tensor unused = std::exchange(parameter.unused, at::Tensor());
    if (!is_mine(parameter)) {
      grad = at::Tensor();
    } else if (shares[i] > 0) {
      if (scale() != 1) parameter.view.mul_(scale());
      if (kept.defined()) parameter.view.add_(kept);
      grad = parameter.view;
    } else if (kept.defined()) {
      grad = kept;
    } else if (parameter.had_zeros) {
      grad = parameter.view.zero_();
    } else if (unused.defined() && !(hook && !parameter.sparse && !unused.any().item<bool>())) {
      parameter.sparse ? void(grad = unused) : void(grad.copy_(unused));  // no rank has added to its own
    } else if (hook && !parameter.sparse && parameter.view.any().item<bool>()) {
      if (scale() != 1) parameter.view.mul_(scale());
      grad = parameter.view;  // what the hook had not sent before
    } else if (lacks_contributors() && grad.defined() && grad.is_same(parameter.view)) {
      parameter.view.mul_(static_cast<double>(options.group.size()) / contributors);  // what it was before
    }
    for (Rows& rows : parameter.parts) {
      at::Tensor average = std::exchange(rows.average, at::Tensor());
      at::Tensor& own = rows.tensor.mutable_grad();
      if (rows.had_zeros && shares[i] <= 0) own = at::zeros_like(rows.tensor);
      if (!average.defined() || shares[i] <= 0) continue;
      own = own.defined() ? average.add_(own) : average;
    }
    if (sharded()) parameter.note_average();
  }
  if (sharded()) release_blocks_without_gradients();
}

// With create_graph: gradients are functions of the parameters, and so are their averages. They do not live in buckets.
// A rank whose backward() threw gives zeros for sparse gradients, which the others have refused.
std::vector<float> GradientReducer::Impl::average_with_graph(bool sets) {
  times.all_gradients = Clock::now();
  begin_communication();
  for (auto& parameter : parameters) parameter.used &= parameter.tensor.grad().defined();
  std::vector<float> shares = shares_used_on_all_ranks();
  std::map<std::pair<at::ScalarType, std::optional<at::ScalarType>>, std::vector<size_t>> by_dtypes;
  for (size_t i = 0; i < shares.size(); ++i)
    if (shares[i] > 0) by_dtypes[{parameters[i].tensor.scalar_type(), parameters[i].reduce_dtype}].push_back(i);
  const at::AutoGradMode with_graph(true);
  for (const auto& [dtypes, indices] : by_dtypes) {
    std::vector<at::Tensor> flat;
    for (const size_t i : indices) {
      const at::Tensor &tensor = parameters[i].tensor, &grad = tensor.grad();
      const bool has_values = grad.defined() && grad.layout() == at::kStrided;
      flat.push_back(has_values ? grad.reshape({-1})
                                : at::zeros({tensor.numel()}, tensor.options().requires_grad(false)));
    }
    at::Tensor all = at::cat(flat);
    if (!all.requires_grad()) {  // the other ranks' may be functions of parameters
      std::vector<at::Tensor> of;
      for (const size_t i : indices) of.push_back(parameters[i].tensor.reshape({-1}));
      all = ConstantIn::apply(at::cat(of), all);
    }
    const at::Tensor averages = functional::all_reduce(all, averaging(dtypes.second));
    int64_t offset = 0;
    for (const size_t i : indices) {
      if (!sets) break;
      const at::Tensor& tensor = parameters[i].tensor;
      // Not a view: optimizers call detach_() on gradients, which views refuse.
      tensor.mutable_grad() = averages.narrow(0, offset, tensor.numel()).view(tensor.sizes()).clone();
      offset += tensor.numel();
    }
  }
  return shares;
}

void GradientReducer::Impl::report_unused(const std::vector<float>& shares, const char* of) const {
  std::vector<size_t> others, some, none;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] < 0) others.push_back(i);
    if (shares[i] == 0) none.push_back(i);
    if (shares[i] > 0 && shares[i] < 1) some.push_back(i);
  }
  const auto names = [&](const std::vector<size_t>& indices) {
    std::vector<std::string> list;
    for (const size_t index : indices) list.push_back(parameters[index].name);
    return join(list);
  };
  const auto least = static_cast<float>(-options.group.size());  // of the marks that name parameters
  const bool is_named = std::none_of(shares.begin(), shares.end(), [&](float share) { return share < least - 0.5F; });
  if (!others.empty())
    throw InvalidArgument(
        text("with static_graph, backward() threw on a rank, or gave parameters another number of gradients than the ",
             "first backward()", is_named ? ": " + names(others) : ", which that rank's error names"),
        "Use the same parameters in each forward(), or set static_graph to false");
  if (options.static_graph) none.clear();
  std::string message = "backward() left parameters without a gradient";
  if (!none.empty()) message += text("; on all ", of, ": ", names(none));
  if (!some.empty()) message += text("; on some ", of, ": ", names(some));
  for (const auto& indices : {none, some})
    for (const size_t index : indices)
      if (!parameters[index].tensor.requires_grad())
        throw InvalidArgument(
            text(message, ". ", parameters[index].name, " has been frozen since the ", options.user, " was made"),
            text("Make the ", options.user, " anew, or set find_unused_parameters"));
  throw InvalidArgument(message,
                        "Let forward() use them in every step, freeze them with set_requires_grad(false), or set "
                        "find_unused_parameters");
}

}  // namespace muster::parallel
