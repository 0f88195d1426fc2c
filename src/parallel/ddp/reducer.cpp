#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>
#include <optional>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/parallel/ddp.h"
#include "parallel/ddp/buckets.h"
#include "parallel/ddp/gradient_blocks.h"

namespace muster::ddp {
namespace {

size_t bytes_of_mb(double mb) { return static_cast<size_t>(mb * (1 << 20)); }

// Called by autograd when a parameter's gradient has been accumulated.
class ReadyHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  using Pointer = std::unique_ptr<PostAccumulateGradHook>;

  ReadyHook(const void* owner, std::function<void()> on_ready, Pointer before)
      : owner_(owner), on_ready_(std::move(on_ready)), before_(std::move(before)) {}
  void operator()(const torch::autograd::Variable& tensor) override {
    if (before_) (*before_)(tensor);
    on_ready_();
  }

  // Takes the owner's hook out of the chain that `head` begins; others' stay.
  static void remove(Pointer& head, const void* owner) {
    auto* const hook = dynamic_cast<ReadyHook*>(head.get());
    if (!hook) return;
    if (hook->owner_ == owner)
      head = std::exchange(hook->before_, nullptr);
    else
      remove(hook->before_, owner);
  }

 private:
  const void* const owner_;
  const std::function<void()> on_ready_;
  Pointer before_;  // the user's own, or another DistributedDataParallel's
};

// Whether all ranks reached all parameters.
bool complete(const std::vector<float>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](float share) { return share >= 1; });
}

}  // namespace

struct Reducer::Impl : std::enable_shared_from_this<Reducer::Impl> {
  std::shared_ptr<torch::nn::Module> module;
  DdpOptions options;
  std::shared_ptr<Heap> heap;
  std::optional<GradientBlocks> blocks;
  Group group;

  std::vector<Parameter> parameters;  // trainable, in the module's order
  std::vector<at::Tensor> buffers;
  std::vector<Bucket> buckets;
  std::vector<size_t> ready_order;  // parameters in the order in which the first step's gradients came
  bool rebuilt = false;

  bool sync = true;    // whether the next backward() reduces
  bool synced = true;  // whether the last backward() that began reduces
  // The backward() under way: alive as long as autograd holds its final callback. So a backward() that threw, whose
  // callback never ran, can be distinguished from one that is still running.
  std::weak_ptr<GradientBlocks::Serving> running;
  bool dirty = false;      // a backward() has begun and has been neither finished nor abandoned
  size_t next_bucket = 0;  // buckets are reduced in order, the same on all ranks

  void build(const std::vector<size_t>& order, size_t first_bytes);
  void on_ready(size_t index);
  void adopt(Parameter& parameter);
  void launch_ready_buckets();
  void begin_backward(Parameter& first);
  std::vector<float> reduce_the_rest();
  void finish_backward();
  void abandon_backward();
  void reset();
  void rebuild_in_ready_order();
  void report_unused(const std::vector<size_t>& some, const std::vector<size_t>& none) const;
};

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, DdpOptions options) : impl_(std::make_shared<Impl>()) {
  if (!module) throw InvalidArgument("DistributedDataParallel needs a module, got null");
  Impl& s = *impl_;
  s.module = std::move(module);
  s.options = std::move(options);
  World& world = World::current();
  s.heap = world.shared_heap();
  s.blocks.emplace(s.heap, s.options.replace_allocator);
  s.group = s.options.group.resolved();
  if (!(s.options.bucket_cap_mb > 0) || !(s.options.first_bucket_cap_mb > 0))
    throw InvalidArgument(
        text("bucket_cap_mb is ", s.options.bucket_cap_mb, " and first_bucket_cap_mb ", s.options.first_bucket_cap_mb),
        "Use sizes above 0, in MiB");
  if (!s.group.is_member()) throw InvalidArgument("this rank is not a member of DistributedDataParallel's group");

  std::vector<NamedTensor> all;
  for (const auto& item : s.module->named_parameters()) {
    all.push_back({item.key(), item.value()});
    const bool shared = std::any_of(s.parameters.begin(), s.parameters.end(),
                                    [&](const Parameter& other) { return other.tensor.is_same(item.value()); });
    if (item.value().requires_grad() && !shared) s.parameters.push_back({.name = item.key(), .tensor = item.value()});
  }
  for (const auto& item : s.module->named_buffers()) {
    all.push_back({item.key(), item.value()});
    s.buffers.push_back(item.value());
  }
  require_same_on_all_ranks(all,
                            text("bucket_cap_mb=", s.options.bucket_cap_mb,
                                 " first_bucket_cap_mb=", s.options.first_bucket_cap_mb, " find_unused_parameters=",
                                 s.options.find_unused_parameters, " broadcast_buffers=", s.options.broadcast_buffers),
                            s.group);
  if (s.parameters.empty())
    throw InvalidArgument("the module has no parameter that requires grad", "Use it without DistributedDataParallel");
  broadcast_from_first(all, s.group);

  // Gradients tend to become ready from the last layer to the first.
  std::vector<size_t> order(s.parameters.size());
  std::iota(order.rbegin(), order.rend(), size_t{0});
  s.build(order, bytes_of_mb(s.options.first_bucket_cap_mb));

  const std::weak_ptr<Impl> weak = impl_;
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    auto& hooks = torch::autograd::impl::post_acc_grad_hooks(s.parameters[i].tensor);
    const auto on_ready = [weak, i] {
      if (const auto impl = weak.lock()) impl->on_ready(i);
    };
    torch::autograd::impl::set_post_acc_grad_hooks(s.parameters[i].tensor,
                                                   std::make_unique<ReadyHook>(&s, on_ready, std::move(hooks)));
  }
}

Reducer::~Reducer() {
  // Gradients remain views of the buckets, and keep them alive.
  for (auto& parameter : impl_->parameters)
    ReadyHook::remove(torch::autograd::impl::post_acc_grad_hooks(parameter.tensor), impl_.get());
}

void Reducer::before_forward() {
  Impl& s = *impl_;
  if (s.dirty && s.running.expired()) s.abandon_backward();
  if (s.sync && s.options.broadcast_buffers && s.module->is_training() && !s.buffers.empty()) {
    std::vector<NamedTensor> named;
    for (const auto& buffer : s.buffers) named.push_back({"", buffer});
    broadcast_from_first(named, s.group);
  }
}

bool Reducer::set_sync(bool on) { return std::exchange(impl_->sync, on); }

std::vector<std::vector<std::string>> Reducer::bucket_names() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : impl_->buckets) {
    auto& list = names.emplace_back();
    for (const size_t index : bucket.parameters) list.push_back(impl_->parameters[index].name);
  }
  return names;
}

// Lays the parameters out in buckets; existing gradients move there, too.
void Reducer::Impl::build(const std::vector<size_t>& order, size_t first_bytes) {
  const at::NoGradGuard no_grad;
  buckets = make_buckets(parameters, order, first_bytes, bytes_of_mb(options.bucket_cap_mb), *heap, *blocks);
  for (auto& parameter : parameters) {
    at::Tensor& grad = parameter.tensor.mutable_grad();
    if (!grad.defined() || grad.is_sparse()) continue;
    if (grad.is_same(parameter.view)) continue;
    parameter.view.copy_(grad);
    grad = parameter.view;
  }
}

// Makes the parameter's view of its bucket the gradient. If .grad was undefined (after zero_grad()), autograd has set
// its own tensor there. If the view was in place, autograd has accumulated into it, and there is nothing to do.
void Reducer::Impl::adopt(Parameter& parameter) {
  at::Tensor& grad = parameter.tensor.mutable_grad();
  if (!grad.defined() || grad.is_same(parameter.view)) return;
  if (grad.layout() != at::kStrided)
    throw InvalidArgument(text("the gradient of ", parameter.name, " is sparse"),
                          "Create the embedding with sparse(false): DistributedDataParallel reduces dense gradients");
  const at::NoGradGuard no_grad;
  Bucket& bucket = buckets[parameter.bucket];
  if (bucket.large) {
    if (adopt_block(bucket, parameter, grad, *blocks)) return;
    if (!parameter.view.defined()) give_block(bucket, parameter, *blocks);
  }
  parameter.view.copy_(grad);
  grad = parameter.view;
}

void Reducer::Impl::on_ready(size_t index) {
  Parameter& parameter = parameters[index];
  if (running.expired()) begin_backward(parameter);
  adopt(parameter);
  parameter.used = true;
  if (!synced || parameter.ready) return;  // a parameter used twice in a double backward is ready once
  parameter.ready = true;
  if (!rebuilt) ready_order.push_back(index);
  Bucket& bucket = buckets[parameter.bucket];
  if (--bucket.pending == 0) launch_ready_buckets();
}

// The gradient of `first` has come, and belongs to this backward(), not to the one that threw.
void Reducer::Impl::begin_backward(Parameter& first) {
  if (dirty) {
    at::Tensor& grad = first.tensor.mutable_grad();
    at::Tensor own;
    if (!grad.is_same(first.view)) own = std::exchange(grad, at::Tensor());
    abandon_backward();
    if (own.defined()) grad = own;
  }
  dirty = true;
  synced = sync;
  ready_order.clear();
  for (Bucket& bucket : buckets) {  // release blocks whose gradients are gone, so that new gradients can use them
    Parameter& first = parameters[bucket.parameters[0]];
    if (!bucket.large || first.tensor.grad().defined()) continue;
    first.view = bucket.flat = bucket.used = at::Tensor();
  }
  const auto token = std::make_shared<GradientBlocks::Serving>(*blocks);
  running = token;
  torch::autograd::Engine::get_default_engine().queue_callback(
      [self = shared_from_this(), token] { self->finish_backward(); });
}

// The last bucket is not launched here: it is complete only when backward is nearly over, so finish_backward() reduces
// it, and needs no other thread for that.
void Reducer::Impl::launch_ready_buckets() {
  for (; next_bucket + 1 < buckets.size() && buckets[next_bucket].pending == 0; ++next_bucket) {
    Bucket& bucket = buckets[next_bucket];
    mark_used(bucket, parameters);
    bucket.work = all_reduce_async(bucket.flat, {.op = ReduceOp::AVG, .group = group});
  }
}

// Reduces the buckets that are not reduced yet, and waits for all. Every rank reduces every bucket in every backward(),
// whatever happens in it, so that the ranks' collectives stay in step; parameters without a gradient contribute zeros.
// Returns the share of the ranks that reached each parameter.
std::vector<float> Reducer::Impl::reduce_the_rest() {
  const at::NoGradGuard no_grad;
  for (auto& parameter : parameters) {
    if (parameter.ready) continue;
    if (parameter.tensor.grad().defined()) {
      adopt(parameter);
      continue;
    }
    parameter.used = false;  // what no_sync() left has been discarded since
    Bucket& bucket = buckets[parameter.bucket];
    if (!parameter.view.defined()) give_block(bucket, parameter, *blocks);
    parameter.view.zero_();
  }
  for (auto& bucket : buckets) bucket.pending = 0;
  launch_ready_buckets();
  mark_used(buckets.back(), parameters);
  all_reduce(buckets.back().flat, {.op = ReduceOp::AVG, .group = group});
  std::vector<float> shares(parameters.size());
  for (auto& bucket : buckets) {
    bucket.work.wait();
    const std::vector<float> of_bucket = shares_used(bucket);
    for (size_t i = 0; i < of_bucket.size(); ++i) shares[bucket.parameters[i]] = of_bucket[i];
  }
  return shares;
}

// To be called after a backward() threw on this rank. If it was not in no_sync(), the other ranks wait for its buckets;
// they learn from `used` that not all gradients are there, whatever an earlier no_sync() has left. If all are there,
// this was the step of the other ranks, after which they may agree on the order of the buckets.
void Reducer::Impl::abandon_backward() {
  bool all = false;
  if (synced) {
    for (auto& parameter : parameters) parameter.used = parameter.ready;
    all = complete(reduce_the_rest());
  }
  reset();
  if (!rebuilt && all) rebuild_in_ready_order();
}

// Runs when the engine has finished this backward().
void Reducer::Impl::finish_backward() {
  running.reset();
  if (!synced) {
    dirty = false;
    return;
  }
  const at::NoGradGuard no_grad;
  const std::vector<float> shares = reduce_the_rest();
  std::vector<size_t> some, none;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (shares[i] == 0) {
      none.push_back(i);
      continue;
    }
    if (shares[i] < 1) some.push_back(i);
    parameters[i].tensor.mutable_grad() = parameters[i].view;
  }
  reset();
  if (!rebuilt && complete(shares)) rebuild_in_ready_order();
  if (!complete(shares) && !options.find_unused_parameters) report_unused(some, none);
}

void Reducer::Impl::reset() {
  dirty = false;
  running.reset();
  next_bucket = 0;
  for (auto& parameter : parameters) {
    parameter.ready = false;
    if (synced) parameter.used = false;
  }
  for (auto& bucket : buckets) {
    bucket.pending = bucket.parameters.size();
    bucket.work = Work();
  }
}

// All ranks use rank 0's order, so that buckets stay the same on all ranks. Parameters that only an earlier backward()
// in no_sync() came to follow at the end.
void Reducer::Impl::rebuild_in_ready_order() {
  rebuilt = true;
  std::vector<bool> listed(parameters.size());
  for (const size_t index : ready_order) listed[index] = true;
  for (size_t i = 0; i < listed.size(); ++i)
    if (!listed[i]) ready_order.push_back(i);
  const auto n = static_cast<int64_t>(ready_order.size());
  at::Tensor order = at::zeros({n}, at::kLong);
  std::copy(ready_order.begin(), ready_order.end(), order.mutable_data_ptr<int64_t>());
  broadcast(order, 0, {.group = group});
  const auto* const first = order.const_data_ptr<int64_t>();
  std::vector<size_t> agreed(first, first + n);
  build(agreed, bytes_of_mb(options.first_bucket_cap_mb));
}

void Reducer::Impl::report_unused(const std::vector<size_t>& some, const std::vector<size_t>& none) const {
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
                        "DdpOptions::find_unused_parameters");
}

}  // namespace muster::ddp
