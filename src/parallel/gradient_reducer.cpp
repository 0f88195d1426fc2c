#include "parallel/gradient_reducer.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/node.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <numeric>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/functional.h"
#include "parallel/accumulation_hooks.h"
#include "parallel/buckets.h"
#include "parallel/gradient_blocks.h"

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

// Whether all ranks reached all parameters.
bool complete(const std::vector<float>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](float share) { return share >= 1; });
}

}  // namespace

struct GradientReducer::Impl : std::enable_shared_from_this<GradientReducer::Impl> {
  Impl(ReducerOptions with, std::shared_ptr<Heap> its_heap)
      : options(std::move(with)), heap(std::move(its_heap)), blocks(heap, options.replace_allocator) {}

  const ReducerOptions options;
  const std::shared_ptr<Heap> heap;
  GradientBlocks blocks;

  std::vector<Parameter> parameters;  // trainable, in the module's order
  std::vector<Bucket> buckets;
  CommHook hook;                    // or none
  std::vector<size_t> ready_order;  // parameters in the order in which the first step's gradients came
  bool rebuilt = false;

  bool sync = true;          // whether the next backward() reduces
  bool synced = true;        // whether the last backward() that began reduces
  bool keeps_graph = false;  // whether it makes a graph (create_graph)
  // The backward() under way: alive as long as autograd holds its final callback. So a backward() that threw, whose
  // callback never ran, can be distinguished from one that is still running.
  std::weak_ptr<GradientBlocks::Serving> running;
  bool dirty = false;          // a backward() has begun and has been neither finished nor abandoned
  size_t next_bucket = 0;      // buckets are reduced in order, the same on all ranks
  size_t released_bucket = 0;  // with owners: the first whose block may be in use after its reduction
  size_t bytes_in_flight = 0;  // of large gradients between both numbers, which will be freed

  bool sharded() const { return !options.owners.empty(); }
  bool is_mine(const Parameter& parameter) const {
    return parameter.owner == kEveryRank || parameter.owner == options.group.rank();
  }

  void build(const std::vector<size_t>& order);
  void before_accumulation();
  void on_ready(size_t index);
  void adopt(Parameter& parameter);
  ReduceOptions averaging() const {
    return {.op = ReduceOp::AVG, .group = options.group, .between_hosts = options.reduce_dtype};
  }
  bool to_owner() const { return sharded() && !options.owner_on_each_host; }
  // Whether a collective of its own tells which parameters were used; else buckets do.
  bool tells_shares_apart() const {
    return sharded() || hook ||
           std::any_of(buckets.begin(), buckets.end(), [](const Bucket& bucket) { return bucket.sparse; });
  }
  void launch(size_t index);
  void call_hook(size_t index);
  void use_hooks_results();
  std::vector<float> average_with_graph();
  std::vector<float> average_the_rest() { return keeps_graph ? average_with_graph() : reduce_the_rest(); }
  void use_averages(const std::vector<float>& shares);
  void launch_ready_buckets();
  bool will_be_freed(const Bucket& bucket) const;
  void release_reduced_blocks();
  void release_blocks_without_gradients();
  void begin_backward();
  void put_averages_aside();
  std::vector<float> reduce_the_rest();
  std::vector<float> shares_used_on_all_ranks();
  void finish_backward();
  void abandon_backward();
  void abandon_backward_before(Parameter& first);
  void reset();
  void rebuild_in_ready_order();
  void require_dense(const Parameter& parameter, const at::Tensor& grad) const;
  void report_unused(const std::vector<float>& shares) const;
};

GradientReducer::GradientReducer(const std::vector<NamedTensor>& parameters, ReducerOptions options,
                                 std::shared_ptr<Heap> heap)
    : impl_(std::make_shared<Impl>(std::move(options), std::move(heap))) {
  Impl& s = *impl_;
  for (size_t i = 0; i < parameters.size(); ++i)
    s.parameters.push_back({.name = parameters[i].name,
                            .tensor = parameters[i].tensor,
                            .owner = s.sharded() ? s.options.owners[i] : kEveryRank,
                            .sparse = !s.options.sparse.empty() && s.options.sparse[i]});
  // Gradients tend to become ready from the last layer to the first.
  std::vector<size_t> order(s.parameters.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  s.build(order);

  const std::weak_ptr<Impl> weak = impl_;
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    Parameter& parameter = s.parameters[i];
    auto& hooks = torch::autograd::impl::post_acc_grad_hooks(parameter.tensor);
    const auto on_ready = [weak, i] {
      if (const auto impl = weak.lock()) impl->on_ready(i);
    };
    torch::autograd::impl::set_post_acc_grad_hooks(parameter.tensor,
                                                   std::make_unique<ReadyHook>(&s, on_ready, std::move(hooks)));
    if (!s.sharded()) continue;
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    parameter.accumulator->add_pre_hook(std::make_unique<BeginHook>(&s, [weak] {
      if (const auto impl = weak.lock()) impl->before_accumulation();
    }));
  }
}

GradientReducer::~GradientReducer() {
  // Gradients remain views of the buckets, and keep them alive.
  for (auto& parameter : impl_->parameters) {
    ReadyHook::remove(torch::autograd::impl::post_acc_grad_hooks(parameter.tensor), impl_.get());
    if (parameter.accumulator) BeginHook::remove(parameter.accumulator->pre_hooks(), impl_.get());
  }
}

void GradientReducer::before_forward() {
  if (impl_->dirty && impl_->running.expired()) impl_->abandon_backward();
}

void GradientReducer::set_hook(CommHook hook) {
  if (!hook) throw InvalidArgument("the communication hook is empty");
  if (impl_->hook)
    throw InvalidArgument(text(impl_->options.user, " has a communication hook already"),
                          "Register one hook; a hook may call others");
  before_forward();  // makes up for a backward() that threw, as the other ranks did it
  impl_->hook = std::move(hook);
}

bool GradientReducer::sync() const { return impl_->sync; }
bool GradientReducer::set_sync(bool on) { return std::exchange(impl_->sync, on); }

std::vector<std::vector<std::string>> GradientReducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : impl_->buckets) {
    auto& list = names.emplace_back();
    for (const size_t index : bucket.parameters) list.push_back(impl_->parameters[index].name);
  }
  return names;
}

// Lays the parameters out in buckets; existing gradients move there, too.
void GradientReducer::Impl::build(const std::vector<size_t>& order) {
  const at::NoGradGuard no_grad;
  buckets = make_buckets(parameters, order, bytes_of_mb(options.first_bucket_cap_mb),
                         bytes_of_mb(options.bucket_cap_mb), *heap, blocks);
  for (auto& parameter : parameters) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!grad.defined() || grad.is_sparse() || parameter.sparse) continue;
    if (grad.is_same(parameter.view)) continue;
    if (!parameter.view.defined()) give_block(buckets[parameter.bucket], parameter, blocks);
    parameter.view.copy_(grad);
    grad = parameter.view;
  }
}

void GradientReducer::Impl::require_dense(const Parameter& parameter, const at::Tensor& grad) const {
  if (grad.layout() != at::kStrided)
    throw InvalidArgument(text("the gradient of ", parameter.name, " is sparse"),
                          text("Create the embedding with sparse(false): ", options.user, " reduces dense gradients"));
}

// Makes the parameter's view of its bucket the gradient. If .grad was undefined (after zero_grad()), autograd has set
// its own tensor there. If the view was in place, autograd has accumulated into it, and there is nothing to do.
void GradientReducer::Impl::adopt(Parameter& parameter) {
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined() || grad.is_same(parameter.view)) return;
  if (parameter.sparse) {
    const at::NoGradGuard no_grad;
    if (grad.layout() != at::kSparse) grad = grad.to_sparse(1);  // of a use that is not sparse
    return;
  }
  require_dense(parameter, grad);
  const at::NoGradGuard no_grad;
  Bucket& bucket = buckets[parameter.bucket];
  if (bucket.large) {
    if (adopt_block(bucket, parameter, grad, blocks)) return;
    if (!parameter.view.defined()) give_block(bucket, parameter, blocks);
  }
  parameter.view.copy_(grad);
  grad = parameter.view;
}

// With owners, before autograd adds to a .grad.
void GradientReducer::Impl::before_accumulation() {
  if (!running.expired()) return;
  if (dirty) abandon_backward();
  begin_backward();
  put_averages_aside();
}

void GradientReducer::Impl::on_ready(size_t index) {
  Parameter& parameter = parameters[index];
  if (running.expired()) {
    if (dirty) abandon_backward_before(parameter);
    begin_backward();
  }
  if (synced && parameter.ready && parameter.bucket < next_bucket)
    throw InvalidArgument(
        text("parameter ", parameter.name,
             " got a second gradient in one backward(), when its first had been averaged"),
        "Do not run backward() inside of backward() on parameters that both use, or use no_sync() for this backward()");
  if (!keeps_graph) adopt(parameter);
  parameter.used = true;
  if (!synced || parameter.ready) return;  // a parameter used twice in a double backward is ready once
  parameter.ready = true;
  if (keeps_graph) return;
  if (!rebuilt) ready_order.push_back(index);
  Bucket& bucket = buckets[parameter.bucket];
  if (--bucket.pending == 0) launch_ready_buckets();
  if (sharded()) release_reduced_blocks();
}

// The gradient of `first` has come, and belongs to this backward(), not to the one that threw.
void GradientReducer::Impl::abandon_backward_before(Parameter& first) {
  at::Tensor& grad = first.tensor.mutable_grad();
  at::Tensor own;
  if (!grad.is_same(first.view)) own = std::exchange(grad, at::Tensor());
  abandon_backward();
  if (own.defined()) grad = own;
}

void GradientReducer::Impl::begin_backward() {
  const bool with_graph = !sharded() && at::GradMode::is_enabled();
  if (with_graph && hook && sync)
    throw InvalidArgument("backward() with create_graph does not go through a communication hook",
                          "Use a module without a hook, or autograd::grad()");
  dirty = true;
  synced = sync;
  keeps_graph = with_graph;
  ready_order.clear();
  release_blocks_without_gradients();  // so that new gradients can use them
  const auto token = std::make_shared<GradientBlocks::Serving>(blocks);
  running = token;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), token] { self->finish_backward(); });
}

// Averages that the user has not cleared: this backward() is to add to them, after its own are known.
void GradientReducer::Impl::put_averages_aside() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!std::exchange(parameter.averaged, false) || !grad.defined()) continue;
    if (!synced) {
      parameter.averaged = true;
      throw InvalidArgument(text("backward() in no_sync() would add to the gradient of ", parameter.name,
                                 ", which is an average that only rank ", options.group.global_rank(parameter.owner),
                                 options.owner_on_each_host ? " has on this host" : " has"),
                            "Call zero_grad() before, or do not use no_sync() for this backward()");
    }
    Bucket& bucket = buckets[parameter.bucket];
    parameter.kept = bucket.large ? grad : grad.clone();
    grad = at::Tensor();
    if (bucket.large) release_block(bucket, parameter);
  }
}

// The last bucket is not launched here: it is complete only when backward is nearly over, so finish_backward() reduces
// it, and needs no other thread for that.
void GradientReducer::Impl::launch_ready_buckets() {
  for (; next_bucket + 1 < buckets.size() && buckets[next_bucket].pending == 0; ++next_bucket) launch(next_bucket);
}

void GradientReducer::Impl::launch(size_t index) {
  Bucket& bucket = buckets[index];
  if (bucket.sparse) {
    bucket.work = all_reduce_async(parameters[bucket.parameters[0]].tensor.grad(), averaging());
    return;
  }
  if (hook) return call_hook(index);
  if (!tells_shares_apart()) mark_used(bucket, parameters);
  bucket.work =
      to_owner() ? reduce_async(bucket.flat, bucket.owner, averaging()) : all_reduce_async(bucket.flat, averaging());
  if (will_be_freed(bucket)) bytes_in_flight += parameters[bucket.parameters[0]].tensor.nbytes();
}

void GradientReducer::Impl::release_blocks_without_gradients() {
  for (Bucket& bucket : buckets)
    if (Parameter& first = parameters[bucket.parameters[0]]; bucket.large && !first.tensor.grad().defined())
      release_block(bucket, first);
}

// When it is reduced: a large gradient that another rank owns.
bool GradientReducer::Impl::will_be_freed(const Bucket& bucket) const {
  return bucket.large && !is_mine(parameters[bucket.parameters[0]]);
}

// Frees large gradients whose owners have them. What this waits for, the other ranks reach without this one: it has
// passed there.
void GradientReducer::Impl::release_reduced_blocks() {
  const auto may_go = [&](Bucket& bucket) {
    return bucket.work.is_completed() || bytes_in_flight > options.most_in_flight;
  };
  for (; released_bucket < next_bucket && may_go(buckets[released_bucket]); ++released_bucket) {
    Bucket& bucket = buckets[released_bucket];
    bucket.work.wait();  // throws what the reduction threw
    if (!will_be_freed(bucket)) continue;
    Parameter& first = parameters[bucket.parameters[0]];
    bytes_in_flight -= first.tensor.nbytes();
    bucket.work = Work();  // it refers to the tensor
    first.tensor.mutable_grad() = at::Tensor();
    release_block(bucket, first);
  }
}

// Reduces the buckets that are not reduced yet, and waits for all. Every rank reduces every bucket in every backward(),
// whatever happens in it, so that the ranks' collectives stay in step; parameters without a gradient contribute zeros.
// Returns the share of the ranks that reached each parameter.
std::vector<float> GradientReducer::Impl::reduce_the_rest() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    if (parameter.ready) continue;
    if (parameter.tensor.grad().defined()) {
      adopt(parameter);
      continue;
    }
    parameter.used = false;  // what no_sync() left has been discarded since
    if (parameter.sparse) {
      parameter.tensor.mutable_grad() = no_rows(parameter.tensor);
      continue;
    }
    Bucket& bucket = buckets[parameter.bucket];
    if (!parameter.view.defined()) give_block(bucket, parameter, blocks);
    parameter.view.zero_();
  }
  for (auto& bucket : buckets) bucket.pending = 0;
  launch_ready_buckets();
  Bucket& last = buckets.back();
  if (!tells_shares_apart()) mark_used(last, parameters);
  if (hook || last.sparse)
    launch(buckets.size() - 1);
  else if (to_owner())
    reduce(last.flat, last.owner, averaging());
  else
    all_reduce(last.flat, averaging());
  if (hook) use_hooks_results();
  if (tells_shares_apart()) {
    std::vector<float> shares = shares_used_on_all_ranks();
    for (auto& bucket : buckets) bucket.work.wait();
    return shares;
  }
  std::vector<float> shares(parameters.size());
  for (auto& bucket : buckets) {
    bucket.work.wait();
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
  GradBucket bucket(before, before + after, of.flat.narrow(0, 0, of.flat.numel() - of.used.numel()), std::move(places),
                    options.group, heap);
  buckets[index].future = hook(bucket);
  for (size_t i = 0; i < index; ++i)
    if (buckets[i].future) buckets[i].future->go_on();
}

void GradientReducer::Impl::use_hooks_results() {
  for (Bucket& bucket : buckets) {
    if (!bucket.future) continue;
    const at::Tensor result = bucket.future->get();
    bucket.future.reset();
    const at::Tensor buffer = bucket.flat.narrow(0, 0, bucket.flat.numel() - bucket.used.numel());
    if (!result.defined() || result.numel() != buffer.numel())
      throw InvalidArgument(
          text("the communication hook returned ",
               result.defined() ? text("a tensor of ", result.numel(), " elements") : std::string("no tensor"),
               " for the bucket of ", buffer.numel(), " that begins with parameter ",
               parameters[bucket.parameters[0]].name),
          "Return the bucket's buffer(), or a tensor with as many elements");
    if (result.const_data_ptr() != buffer.const_data_ptr()) buffer.copy_(result.reshape({-1}));
  }
}

// Returns when every rank has come here. With owners, buckets tell only their owners, and may be freed by now.
std::vector<float> GradientReducer::Impl::shares_used_on_all_ranks() {
  std::vector<float> shares;
  for (const auto& parameter : parameters) shares.push_back(parameter.used ? 1 : 0);
  all_reduce(at::from_blob(shares.data(), {static_cast<int64_t>(shares.size())}, at::kFloat), averaging());
  return shares;
}

// To be called after a backward() threw on this rank. If it was not in no_sync(), the other ranks wait for its buckets;
// they learn from `used` that not all gradients are there, whatever an earlier no_sync() has left. If all are there,
// this was the step of the other ranks, after which they may agree on the order of the buckets.
void GradientReducer::Impl::abandon_backward() {
  bool all = false;
  if (synced) {
    for (auto& parameter : parameters) parameter.used = parameter.ready;
    all = complete(average_the_rest()) && !keeps_graph;
  }
  for (auto& parameter : parameters) {
    parameter.kept = at::Tensor();  // after an exception, gradients are undefined
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (synced && !is_mine(parameter) && grad.is_same(parameter.view)) grad = at::Tensor();
  }
  const bool is_over = synced;
  reset();
  if (!rebuilt && all) rebuild_in_ready_order();
  if (is_over) options.on_averaged();
}

// Runs when the engine has finished this backward().
void GradientReducer::Impl::finish_backward() {
  running.reset();
  if (!synced) {
    dirty = false;
    return;
  }
  const at::NoGradGuard no_grad;
  const std::vector<float> shares = average_the_rest();
  if (!keeps_graph) use_averages(shares);
  reset();
  if (!rebuilt && complete(shares) && !keeps_graph) rebuild_in_ready_order();
  options.on_averaged();
  if (!complete(shares) && !options.find_unused_parameters) report_unused(shares);
}

// Sets each .grad to the average, where it is to be kept.
void GradientReducer::Impl::use_averages(const std::vector<float>& shares) {
  for (size_t i = 0; i < shares.size(); ++i) {
    Parameter& parameter = parameters[i];
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (parameter.sparse) {
      if (shares[i] == 0 && grad.defined() && grad._nnz() == 0) grad = at::Tensor();  // no_rows()
      continue;
    }
    at::Tensor kept = std::exchange(parameter.kept, at::Tensor());
    if (!is_mine(parameter)) {
      grad = at::Tensor();
    } else if (shares[i] > 0) {
      if (kept.defined()) parameter.view.add_(kept);
      grad = parameter.view;
    } else if (kept.defined()) {
      grad = kept;
    }
    parameter.averaged = sharded() && grad.defined();
  }
  if (sharded()) release_blocks_without_gradients();
}

// With create_graph: gradients are functions of the parameters, and so are their averages. They do not live in buckets.
std::vector<float> GradientReducer::Impl::average_with_graph() {
  for (auto& parameter : parameters) parameter.used &= parameter.tensor.grad().defined();
  std::vector<float> shares = shares_used_on_all_ranks();
  std::map<at::ScalarType, std::vector<size_t>> by_dtype;
  for (size_t i = 0; i < shares.size(); ++i)
    if (shares[i] > 0) by_dtype[parameters[i].tensor.scalar_type()].push_back(i);
  const at::AutoGradMode with_graph(true);
  for (const auto& [dtype, indices] : by_dtype) {
    std::vector<at::Tensor> flat;
    for (const size_t i : indices) {
      const at::Tensor &tensor = parameters[i].tensor, &grad = tensor.grad();
      if (grad.defined()) require_dense(parameters[i], grad);
      flat.push_back(grad.defined() ? grad.reshape({-1})
                                    : at::zeros({tensor.numel()}, tensor.options().requires_grad(false)));
    }
    const at::Tensor averages = functional::all_reduce(at::cat(flat), averaging());
    int64_t offset = 0;
    for (const size_t i : indices) {
      const at::Tensor& tensor = parameters[i].tensor;
      tensor.mutable_grad() = averages.narrow(0, offset, tensor.numel()).view(tensor.sizes());
      offset += tensor.numel();
    }
  }
  return shares;
}

void GradientReducer::Impl::reset() {
  dirty = false;
  running.reset();
  next_bucket = released_bucket = bytes_in_flight = 0;
  for (auto& parameter : parameters) {
    parameter.ready = false;
    if (synced) parameter.used = false;
  }
  for (auto& bucket : buckets) {
    bucket.pending = bucket.parameters.size();
    bucket.work = Work();
    bucket.future.reset();
  }
}

// All ranks use rank 0's order, so that buckets stay the same on all ranks. Parameters that only an earlier backward()
// in no_sync() came to follow at the end.
void GradientReducer::Impl::rebuild_in_ready_order() {
  rebuilt = true;
  std::vector<bool> listed(parameters.size());
  for (const size_t index : ready_order) listed[index] = true;
  for (size_t i = 0; i < listed.size(); ++i)
    if (!listed[i]) ready_order.push_back(i);
  const auto n = static_cast<int64_t>(ready_order.size());
  at::Tensor order = at::zeros({n}, at::kLong);
  std::copy(ready_order.begin(), ready_order.end(), order.mutable_data_ptr<int64_t>());
  broadcast(order, 0, {.group = options.group});
  const auto* const first = order.const_data_ptr<int64_t>();
  build({first, first + n});
}

void GradientReducer::Impl::report_unused(const std::vector<float>& shares) const {
  std::vector<size_t> some, none;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) none.push_back(i);
    if (shares[i] > 0 && shares[i] < 1) some.push_back(i);
  }
  const auto names = [&](const std::vector<size_t>& indices) {
    std::vector<std::string> list;
    for (const size_t index : indices) list.push_back(parameters[index].name);
    return join(list);
  };
  std::string message = "backward() left parameters without a gradient";
  if (!none.empty()) message += text("; on all ranks: ", names(none));
  if (!some.empty()) message += text("; on some ranks: ", names(some));
  throw InvalidArgument(message,
                        "Let forward() use them in every step, freeze them with set_requires_grad(false), or set "
                        "find_unused_parameters");
}

size_t bytes_of_mb(double mb) { return static_cast<size_t>(std::min(mb, 1e9) * (1 << 20)); }

ReducerOptions checked(ReducerOptions options) {
  if (!(options.bucket_cap_mb > 0) || !(options.first_bucket_cap_mb > 0))
    throw InvalidArgument(
        text("bucket_cap_mb is ", options.bucket_cap_mb, " and first_bucket_cap_mb ", options.first_bucket_cap_mb),
        "Use sizes above 0, in MiB");
  if (!options.group.is_member())
    throw InvalidArgument(text("this rank is not a member of ", options.user, "'s group"));
  return options;
}

std::string words_of(const ReducerOptions& options) {
  return text(
      options.user, " bucket_cap_mb=", options.bucket_cap_mb, " first_bucket_cap_mb=", options.first_bucket_cap_mb,
      " find_unused_parameters=", options.find_unused_parameters, " broadcast_buffers=", options.broadcast_buffers);
}

}  // namespace muster::parallel
