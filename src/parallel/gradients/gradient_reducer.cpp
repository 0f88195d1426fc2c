#include "parallel/gradients/gradient_reducer.h"

#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/gradients/gradient_reducer_impl.h"
#include "parallel/tape/accumulation_hooks.h"
#include "parallel/tape/saved_tensors.h"

namespace muster::parallel {

GradientReducer::GradientReducer(const std::vector<NamedTensor>& parameters, ReducerOptions options,
                                 std::shared_ptr<Heap> heap)
    : impl_(std::make_shared<Impl>(std::move(options), std::move(heap))) {
  Impl& s = *impl_;
  for (size_t i = 0; i < parameters.size(); ++i)
    s.parameters.push_back({.name = parameters[i].name,
                            .tensor = parameters[i].tensor,
                            .owner = s.sharded() ? s.options.owners[i] : kEveryRank,
                            .parts = s.options.parts.empty() ? std::vector<Rows>{} : s.options.parts[i],
                            .sparse = !s.options.sparse.empty() && s.options.sparse[i],
                            .reduce_dtype = s.options.reduce_dtypes.empty() ? std::nullopt : s.options.reduce_dtypes[i],
                            .expected = s.sharded() ? 1 : 0});
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
    s.hear_of_accumulation(i);
  }
}

void GradientReducer::Impl::hear_of_accumulation(size_t index) {
  Parameter& parameter = parameters[index];
  parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
  parameter.accumulator->add_pre_hook(std::make_unique<BeginHook>(this, [weak = weak_from_this(), index] {
    if (const auto impl = weak.lock()) impl->before_accumulation(index);
  }));
}

GradientReducer::~GradientReducer() {
  // Gradients remain views of the buckets, and keep them alive.
  for (auto& parameter : impl_->parameters) {
    ReadyHook::remove(torch::autograd::impl::post_acc_grad_hooks(parameter.tensor), impl_.get());
    BeginHook::remove(parameter.accumulator->pre_hooks(), impl_.get());
  }
}

void GradientReducer::before_forward() {
  impl_->end_failed_backward();
  for (size_t i = 0; i < impl_->parameters.size(); ++i) {
    // A conversion to another dtype and back gives the parameter another accumulator.
    const Parameter& parameter = impl_->parameters[i];
    if (!parameter.tensor.requires_grad()) continue;
    if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) == parameter.accumulator) continue;
    BeginHook::remove(parameter.accumulator->pre_hooks(), impl_.get());
    impl_->hear_of_accumulation(i);
  }
  const bool is_again = in_second_call() && current_keeper();  // whose backward() is that of the first call
  if (at::GradMode::is_enabled() && !is_again) impl_->forward_in = torch::autograd::get_current_node();
}
void GradientReducer::end_failed_backward() { impl_->end_failed_backward(); }
void GradientReducer::Impl::end_failed_backward() {
  if (dirty && running.expired()) abandon_backward();
}

void GradientReducer::set_hook(CommHook hook) {
  if (!hook) throw InvalidArgument("the communication hook is empty");
  if (impl_->hook)
    throw InvalidArgument(text(impl_->options.user, " has a communication hook already"),
                          "Register one hook; a hook may call others");
  end_failed_backward();  // as the other ranks did it
  impl_->hook = std::move(hook);
}

void GradientReducer::set_averages_at_end(bool at_end) { impl_->averages_at_end = at_end; }
bool GradientReducer::is_in_backward() const { return impl_->synced && impl_->dirty; }

void GradientReducer::set_contributors(int count, bool average_over_them) {
  impl_->contributors = count;
  impl_->averages_over_contributors = average_over_them;
}

void GradientReducer::backward_without_data() {
  Impl& s = *impl_;
  s.require_buckets();
  const at::NoGradGuard no_grad;
  s.synced = true;
  s.keeps_graph = false;
  s.ready_order.clear();
  for (auto& parameter : s.parameters) parameter.tensor.mutable_grad() = at::Tensor();
  s.release_blocks_without_gradients();
  s.times = {};
  s.finish(s.of_contributors(s.reduce_the_rest()), /*is_complete=*/true);
}

bool GradientReducer::sync() const { return impl_->sync; }
bool GradientReducer::set_sync(bool on) { return std::exchange(impl_->sync, on); }

bool GradientReducer::has_rebuilt_buckets() const { return impl_->rebuilt; }
bool GradientReducer::has_hook() const { return static_cast<bool>(impl_->hook); }
const BackwardTimes& GradientReducer::times() const { return impl_->times; }

// Lays the parameters out in buckets; existing gradients move there, too. Buckets of small gradients are made in the
// memory of those before: meanwhile, their gradients are elsewhere. Otherwise the pages of both would stay in use.
void GradientReducer::Impl::build(std::vector<size_t> order) {
  const at::NoGradGuard no_grad;
  laid_out = false;
  std::vector<bool> is_average;
  for (auto& parameter : parameters) {
    is_average.push_back(parameter.has_average());
    if (!parameter.view.defined() || parameter.sparse || buckets[parameter.bucket].large) continue;
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (grad.is_same(parameter.view)) grad = grad.clone();
    parameter.view = at::Tensor();
  }
  for (auto& bucket : buckets)
    if (!bucket.large) bucket.flat = bucket.used = at::Tensor();
  if (!options.delayed.empty())
    std::stable_partition(order.begin(), order.end(), [&](size_t index) { return !options.delayed[index]; });
  buckets = make_buckets(parameters, order, bytes_of_mb(options.first_bucket_cap_mb),
                         bytes_of_mb(options.bucket_cap_mb), *heap, blocks);
  some_buckets_tell_no_shares = std::any_of(buckets.begin(), buckets.end(), [this](const Bucket& bucket) {
    return bucket.sparse || bucket.reduce_dtype ||             // in few bits, the marks might not add up to 1
           !parameters[bucket.parameters[0]].tensor.is_cpu();  // no wait for a device
  });
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters[i];
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!grad.defined() || grad.is_sparse() || parameter.sparse) continue;
    if (grad.is_same(parameter.view)) continue;
    if (!parameter.view.defined()) give_block(buckets[parameter.bucket], parameter, blocks);
    parameter.view.copy_(grad);
    grad = parameter.view;
    if (is_average[i]) parameter.note_average();
  }
  laid_out = true;
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
    parameter.view = grad;
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

// Before autograd adds to a .grad. Without owners, on_ready() begins, because what is there is not put aside.
void GradientReducer::Impl::before_accumulation(size_t index) {
  if (running.expired()) {
    if (!sharded()) return;
    if (dirty) abandon_backward();
    begin_backward();
    put_averages_aside();
  }
  Parameter& parameter = parameters[index];
  const bool has_all = parameter.ready || (knows_graph && parameter.expected == 0);
  if (!synced || !has_all || parameter.bucket >= next_bucket) return;
  if (knows_graph) {
    ++parameter.gradients;
    has_another_graph = true;
    throw InvalidArgument(text("parameter ", parameter.name, " got more gradients than in the first backward(), ",
                               "which were ", parameter.expected, "; with static_graph, their average has begun"),
                          "Use the same parameters in each forward(), or set static_graph to false");
  }
  const bool is_second = parameter.gradients == 1;
  if (!sharded())
    for (auto& each : parameters) each.expected = 0;  // what is known is wrong
  throw InvalidArgument(
      text("parameter ", parameter.name, " got ", is_second ? "a second" : "another",
           " gradient in one backward(), when ", is_second ? "its first" : "those before", " had been averaged"),
      "Do not run backward() inside of backward() on parameters that both use, or use no_sync() for this backward()");
}

void GradientReducer::Impl::on_ready(size_t index) {
  Parameter& parameter = parameters[index];
  if (running.expired()) {
    if (dirty) abandon_backward_before(parameter);
    begin_backward();
  }
  if (keeps_graph != at::GradMode::is_enabled())
    throw InvalidArgument("a backward() with create_graph and one without run inside of each other",
                          "Give both the same create_graph");
  if (keeps_graph)
    require_dense(parameter, parameter.tensor.grad());
  else
    adopt(parameter);
  parameter.used = true;
  if (!synced) return;
  ++parameter.gradients;
  if (!rebuilt) {
    if (parameter.gradients > 1) std::erase(ready_order, index);
    ready_order.push_back(index);
  }
  if (parameter.gradients != parameter.expected) return;
  parameter.ready = true;
  if (keeps_graph) return;
  Bucket& bucket = buckets[parameter.bucket];
  if (--bucket.pending == 0 && !averages_at_end) launch_ready_buckets();
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
  require_buckets();
  const bool with_graph = at::GradMode::is_enabled();
  if (with_graph && sharded())
    throw InvalidArgument(text("backward() with create_graph does not go through ", options.user,
                               ", whose gradients are averages without a graph"),
                          "Use autograd::grad() with create_graph, and backward() of what you make of its results");
  if (with_graph && hook && sync)
    throw InvalidArgument("backward() with create_graph does not go through a communication hook",
                          "Use a module without a hook, or autograd::grad()");
  if (sync && !averages_at_end) options.on_begin(with_graph);
  dirty = true;
  synced = sync;
  keeps_graph = with_graph;
  times = {};
  ready_order.clear();
  release_blocks_without_gradients();  // so that new gradients can use them
  leave_held_gradients();
  if (knows_graph && synced && !keeps_graph) expect_known_gradients();
  call_at_end(std::make_shared<GradientBlocks::Serving>(blocks));
}

// Buckets wait for the parameters that got gradients in the first backward().
void GradientReducer::Impl::expect_known_gradients() {
  const at::NoGradGuard no_grad;
  for (auto& bucket : buckets) bucket.pending = 0;
  for (auto& parameter : parameters) {
    if (parameter.expected > 0)
      ++buckets[parameter.bucket].pending;
    else
      give_zeros(parameter);
  }
}

// Lives as long as autograd's state of one backward(), which ends where that backward() was called. If gradients were
// not averaged by then, because it was called inside of another backward(), they are at the end of that one.
class GradientReducer::Impl::UnderWay {
 public:
  UnderWay(std::weak_ptr<Impl> impl, std::shared_ptr<GradientBlocks::Serving> serving)
      : impl_(std::move(impl)), serving_(std::move(serving)) {}
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
  ~UnderWay() {
    const auto impl = impl_.lock();
    if (!is_called_at_end_ || !impl || !impl->is_within_another()) return;
    try {
      impl->call_at_end(std::move(serving_));
    } catch (...) {  // then it counts as one that threw
    }
  }
  void begin() { is_called_at_end_ = true; }
  void end() {
    is_called_at_end_ = false;
    serving_.reset();
  }

 private:
  const std::weak_ptr<Impl> impl_;
  std::shared_ptr<GradientBlocks::Serving> serving_;
  bool is_called_at_end_ = false;
};

// Calls finish_backward() at the end of the backward() that this thread runs.
void GradientReducer::Impl::call_at_end(std::shared_ptr<GradientBlocks::Serving> serving) {
  const auto under_way = std::make_shared<UnderWay>(weak_from_this(), std::move(serving));
  running = under_way;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this(), under_way] {
    if (self->synced && self->is_within_another()) return;
    under_way->end();
    self->finish_backward();
  });
  under_way->begin();
}

// Where a backward() ends: whether it ran inside of another one, and forward() was not called there.
bool GradientReducer::Impl::is_within_another() const {
  const auto node = torch::autograd::get_current_node();
  return node && node != forward_in.lock();
}

// If this throws, no rank averages.
void GradientReducer::Impl::begin_averages_at_end() {
  if (!averages_at_end) return;
  try {
    options.on_begin(keeps_graph);
  } catch (...) {
    reset();
    throw;
  }
}

void GradientReducer::Impl::release_blocks_without_gradients() {
  for (Bucket& bucket : buckets)
    if (Parameter& first = parameters[bucket.parameters[0]]; bucket.large && !first.tensor.grad().defined())
      release_block(bucket, first);
}

// A .grad that the user holds after zero_grad() stays as it is: blocks that are held are not used, and neither are
// places in buckets.
void GradientReducer::Impl::leave_held_gradients() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters) {
    if (parameter.sparse || buckets[parameter.bucket].large || parameter.tensor.grad().is_same(parameter.view))
      continue;
    if (parameter.view.use_count() > 1) leave_to_holder(buckets[parameter.bucket], parameter);
  }
}

// When it is reduced: a large gradient that another rank owns.
bool GradientReducer::Impl::will_be_freed(const Bucket& bucket) const {
  return bucket.large && !is_mine(parameters[bucket.parameters[0]]);
}

// Frees large gradients whose owners have them. What this waits for, the other ranks reach without this one: it has
// passed there.
void GradientReducer::Impl::release_reduced_blocks() {
  const auto may_go = [&](Bucket& bucket) { return bucket.is_reduced() || bytes_in_flight > options.most_in_flight; };
  for (; released_bucket < next_bucket && may_go(buckets[released_bucket]); ++released_bucket) {
    Bucket& bucket = buckets[released_bucket];
    end_reduction(bucket);  // throws what the reduction threw
    if (!will_be_freed(bucket)) continue;
    Parameter& first = parameters[bucket.parameters[0]];
    bytes_in_flight -= first.tensor.nbytes();
    bucket.works.clear();  // they refer to the tensor
    first.tensor.mutable_grad() = at::Tensor();
    release_block(bucket, first);
  }
}

// To be called after a backward() threw on this rank. If it was not in no_sync(), the other ranks wait for its buckets;
// they learn from `used` that not all gradients are there, whatever an earlier no_sync() has left. If all are there,
// this was the step of the other ranks, after which they may agree on the order of the buckets.
void GradientReducer::Impl::abandon_backward() {
  bool all = false;
  if (synced) {
    begin_averages_at_end();
    options.on_end();
    for (auto& parameter : parameters) parameter.used = parameter.ready;
    all = may_rebuild(of_contributors(keeps_graph ? average_with_graph(/*sets=*/false) : reduce_the_rest()));
  }
  for (auto& parameter : parameters) {
    parameter.kept = parameter.unused = at::Tensor();  // after an exception, gradients are undefined
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (synced && !is_mine(parameter) && grad.is_same(parameter.view)) grad = at::Tensor();
  }
  const bool is_over = synced;
  reset();
  if (!rebuilt && all) rebuild_in_ready_order();
  if (is_over) options.on_averaged(/*is_complete=*/false);
}

// Runs when the engine has finished this backward().
void GradientReducer::Impl::finish_backward() {
  running.reset();
  if (!synced) {
    dirty = false;
    return;
  }
  begin_averages_at_end();
  const at::NoGradGuard no_grad;
  options.on_end();
  const auto shares = of_contributors(keeps_graph ? average_with_graph(/*sets=*/true) : reduce_the_rest());
  if (!sharded() && !knows_graph && !(options.static_graph && keeps_graph))
    for (auto& parameter : parameters)
      parameter.expected =
          options.static_graph ? parameter.gradients : std::max(parameter.expected, parameter.gradients);
  learns_graph = options.static_graph && !knows_graph && !keeps_graph;
  finish(shares, /*is_complete=*/true);
}

void GradientReducer::Impl::finish(const std::vector<float>& shares, bool is_complete) {
  if (!keeps_graph) use_averages(shares);
  const std::string wrong = std::exchange(wrong_results, "");
  const bool learns = std::exchange(learns_graph, false);
  reset();
  const bool is_as_expected =
      options.static_graph ? are_those_of_a_static_graph(shares) : complete(shares) || options.find_unused_parameters;
  knows_graph |= learns && is_as_expected;
  if (learns && !knows_graph)
    for (auto& parameter : parameters) parameter.expected = 0;
  if (wrong.empty() && is_as_expected) times.averaged = Clock::now();
  if (!rebuilt && may_rebuild(shares)) rebuild_in_ready_order();
  options.on_averaged(is_complete);
  if (!wrong.empty()) throw InvalidArgument(wrong, "Return the bucket's buffer(), or a tensor with as many elements");
  if (!is_as_expected) report_unused(shares);
}

void GradientReducer::Impl::reset() {
  dirty = false;
  running.reset();
  has_another_graph = false;
  next_bucket = released_bucket = bytes_in_flight = 0;
  wrong_results.clear();
  for (auto& parameter : parameters) {
    parameter.ready = false;
    parameter.gradients = 0;
    if (parameter.sparse) parameter.view = at::Tensor();  // it is the gradient
    parameter.had_zeros = false;
    for (Rows& rows : parameter.parts) {
      rows.average = at::Tensor();
      rows.had_zeros = false;
    }
    if (synced) parameter.used = false;
  }
  for (auto& bucket : buckets) {
    bucket.pending = bucket.parameters.size();
    bucket.works.clear();
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

}  // namespace muster::parallel
