#include "muster/parallel/comm_hooks.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/hooks/hook_state.h"

namespace muster::comm_hooks {
namespace {

// Between hosts, buffers of 16 bits travel as they are, not as float32.
Work sum_over(const Group& group, const at::Tensor& buffer, ReduceOp op) {
  ReduceOptions options{.op = op, .group = group};
  if (c10::elementSize(buffer.scalar_type()) == 2) options.between_hosts = buffer.scalar_type();
  return muster::all_reduce_async(buffer, options);
}

HookFuture average_over(const Group& group, const at::Tensor& buffer) {
  return {sum_over(group, buffer, ReduceOp::AVG), buffer};
}

at::Tensor shrunk(const GradBucket& bucket, at::ScalarType dtype) {
  at::Tensor buffer = bucket.empty(bucket.buffer().numel(), dtype);
  buffer.copy_(bucket.buffer());
  return buffer;
}

HookFuture compress(GradBucket& bucket, at::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  // Divided first, so that a sum of 16 bits does not overflow where the average does not.
  at::Tensor buffer = shrunk(bucket, dtype).div_(bucket.group().size());
  Work sum = sum_over(bucket.group(), buffer, ReduceOp::SUM);
  return HookFuture(std::move(sum), std::move(buffer)).then([to = bucket.buffer()](const at::Tensor& sum) {
    return to.copy_(sum);
  });
}

CommHook wrapper(CommHook hook, at::ScalarType dtype) {
  if (!hook) throw InvalidArgument("the hook to be wrapped is empty");
  return [hook = std::move(hook), dtype](GradBucket& bucket) {
    const at::NoGradGuard no_grad;
    const at::Tensor buffer = bucket.buffer();
    bucket.set_buffer(shrunk(bucket, dtype));
    return hook(bucket).then([buffer](const at::Tensor& result) {
      const at::NoGradGuard no_grad;
      return result.defined() && result.numel() == buffer.numel() ? buffer.copy_(result.view({-1})) : result;
    });
  };
}

}  // namespace

HookFuture all_reduce(GradBucket& bucket) { return average_over(bucket.group(), bucket.buffer()); }
HookFuture noop(GradBucket& bucket) {
  bucket.average_among({});
  return bucket.buffer();
}
HookFuture fp16_compress(GradBucket& bucket) { return compress(bucket, at::kHalf); }
HookFuture bf16_compress(GradBucket& bucket) { return compress(bucket, at::kBFloat16); }
CommHook fp16_compress_wrapper(CommHook hook) { return wrapper(std::move(hook), at::kHalf); }
CommHook bf16_compress_wrapper(CommHook hook) { return wrapper(std::move(hook), at::kBFloat16); }

// A name cannot be a key of an archive, because it may have dots.
void save(torch::serialize::OutputArchive& archive, const std::string& key, const StateTensors& tensors) {
  std::vector<c10::IValue> names;
  for (const auto& [name, tensor] : tensors) {
    archive.write(text(key, names.size()), tensor);
    names.emplace_back(name);
  }
  archive.write(key, c10::ivalue::Tuple::create(std::move(names)));
}

StateTensors load(torch::serialize::InputArchive& archive, const std::string& key) {
  StateTensors tensors;
  c10::IValue names;
  archive.read(key, names);
  size_t i = 0;
  for (const c10::IValue& name : names.toTupleRef().elements())
    archive.read(text(key, i++), tensors[name.toStringRef()]);
  return tensors;
}

void save(torch::serialize::OutputArchive& archive, int64_t iter) { archive.write("iter", c10::IValue(iter)); }
int64_t load_iter(torch::serialize::InputArchive& archive) {
  c10::IValue iter;
  archive.read("iter", iter);
  return iter.toInt();
}

struct PostLocalSgd::State {
  PostLocalSgdOptions options;
  int64_t iter = 0;
};

PostLocalSgd::PostLocalSgd(PostLocalSgdOptions options)
    : state_(std::make_shared<State>(State{.options = std::move(options)})) {
  Group& subgroup = state_->options.subgroup;
  subgroup = subgroup.resolved();
  if (!subgroup.is_member())
    throw InvalidArgument("this rank is not a member of PostLocalSgd's subgroup",
                          "Give each rank its own, for example by Group::split()");
}

HookFuture PostLocalSgd::operator()(GradBucket& bucket) const {
  const bool is_local = state_->iter >= state_->options.start_local_sgd_iter;
  count(state_->iter, bucket);
  if (!is_local) return all_reduce(bucket);
  if (!state_->options.post_local_gradient_all_reduce) return noop(bucket);
  bucket.average_among(state_->options.subgroup);
  return average_over(state_->options.subgroup, bucket.buffer());
}

int64_t PostLocalSgd::iter() const { return state_->iter; }
void PostLocalSgd::save(torch::serialize::OutputArchive& archive) const { comm_hooks::save(archive, state_->iter); }
void PostLocalSgd::load(torch::serialize::InputArchive& archive) { state_->iter = load_iter(archive); }

}  // namespace muster::comm_hooks
