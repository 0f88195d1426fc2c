#include "parallel/modules/compute_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "autograd/graph/node.h"
#include "base/text.h"
#include "comm/kit/validate.h"
#include "muster/base/error.h"
#include "muster/parallel/sync_batch_norm.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/saved_tensors.h"
#include "parallel/tape/watched.h"

namespace muster::parallel {
namespace {

namespace engine = torch::autograd;

// On which gradients leave a device.
c10::Stream stream_to_host(const at::Device& device) {
  static std::mutex mutex;
  static std::map<c10::DeviceIndex, c10::Stream> streams;  // a process has one type of accelerator
  const std::lock_guard lock(mutex);
  auto at = streams.find(device.index());
  if (at == streams.end())
    at = streams.emplace(device.index(), c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device))
             .first;
  return at->second;
}

// Gradients of one view of a copy, on their way from its device to the CPU.
class Transfer {
 public:
  explicit Transfer(const at::Device& device) : device_(device), stream_(stream_to_host(device)) {}

  // Returns a tensor that has the gradient's values after wait().
  at::Tensor start(const at::Tensor& computed_there) {
    const at::Tensor gradient = computed_there.resolve_conj().resolve_neg();  // or the CPU would do it too early
    const c10::impl::VirtualGuardImpl device(device_.type());
    c10::Event computed(device_.type());
    computed.record(device.getStream(device_));
    computed.block(stream_);
    at::Tensor arriving = at::empty_like(gradient, gradient.options().device(at::kCPU).pinned_memory(true));
    const c10::StreamGuard on_stream(stream_);
    arriving.copy_(gradient, /*non_blocking=*/true);
    device.recordDataPtrOnStream(gradient.storage().data_ptr(), stream_);
    arrived_.emplace(device_.type()).record(stream_);
    return arriving;
  }
  void wait() {
    if (arrived_) arrived_->synchronize();
    arrived_.reset();
  }

 private:
  const at::Device device_;
  const c10::Stream stream_;
  std::optional<c10::Event> arrived_;
};

// Backward of the conversion, on the parameter's device.
class Conversion final : public engine::Node {
 public:
  Conversion(engine::edge_list next, at::ScalarType dtype, std::shared_ptr<Transfer> transfer)
      : Node(std::move(next)), dtype_(dtype), transfer_(std::move(transfer)) {}
  engine::variable_list apply(engine::variable_list&& gradients) override {
    if (transfer_) transfer_->wait();
    if (!gradients[0].defined()) return {at::Tensor()};
    return {gradients[0].to(dtype_)};
  }
  std::string name() const override { return "MusterParameterConversion"; }

 private:
  const at::ScalarType dtype_;
  const std::shared_ptr<Transfer> transfer_;  // that brings the gradient; null: it is computed here
};

// Before the conversion, if a device computes.
class ToHost final : public engine::Node {
 public:
  ToHost(const autograd::NodePtr& conversion, std::shared_ptr<Transfer> transfer)
      : Node(engine::edge_list{engine::Edge(conversion, 0)}), transfer_(std::move(transfer)) {}
  engine::variable_list apply(engine::variable_list&& gradients) override {
    const at::Tensor& gradient = gradients[0];
    if (!gradient.defined()) return {at::Tensor()};
    const bool may_be_read_early = at::GradMode::is_enabled() || engine::AnomalyMode::is_enabled();
    const bool can_be_pinned = at::getAccelerator() == gradient.device().type();
    if (may_be_read_early || !can_be_pinned || gradient.layout() != at::kStrided) return {gradient.to(at::kCPU)};
    return {transfer_->start(gradient)};
  }
  std::string name() const override { return "MusterGradientToHost"; }

 private:
  const std::shared_ptr<Transfer> transfer_;
};

// Makes the view a function of the parameter.
void record_conversion(const at::Tensor& parameter, const at::Tensor& view) {
  auto next = engine::collect_next_edges(parameter);
  const bool moves = view.device() != parameter.device();
  const auto transfer = moves ? std::make_shared<Transfer>(view.device()) : nullptr;
  const auto conversion = autograd::make_node<Conversion>(std::move(next), parameter.scalar_type(), transfer);
  if (!moves) return engine::set_history(view, conversion);
  conversion->add_input_metadata(at::empty({}, view.options().device(parameter.device())).expand(parameter.sizes()));
  engine::set_history(view, autograd::make_node<ToHost>(conversion, transfer));
}

bool keeps_dtype(const torch::nn::Module& module, const MixedPrecision& precision,
                 const std::optional<at::ScalarType>& param_dtype) {
  namespace nn = torch::nn;
  const auto is_one_of = [&]<typename... Modules>(std::tuple<Modules...>*) {
    return (dynamic_cast<const Modules*>(&module) || ...);
  };
  using WithStatistics =
      std::tuple<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
                 nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl, SyncBatchNormImpl>;
  if (param_dtype && c10::elementSize(*param_dtype) == 2 && is_one_of(static_cast<WithStatistics*>(nullptr)))
    return true;
  return precision.full_precision && precision.full_precision(module);
}

// Calls fn(module, the dtypes of what it has itself, whether it keeps its own) for the module and all within it.
void for_each_module(const torch::nn::Module& module, const MixedPrecision& precision, const ModulePrecision& outer,
                     const auto& fn) {
  const ModulePrecision here = precision.of_module ? precision.of_module(module).value_or(outer) : outer;
  fn(module, here, keeps_dtype(module, precision, here.param_dtype));
  for (const auto& child : module.children()) for_each_module(*child, precision, here, fn);
}
void for_each_module(const torch::nn::Module& module, const MixedPrecision& precision, const auto& fn) {
  for_each_module(module, precision,
                  {.param_dtype = precision.param_dtype,
                   .reduce_dtype = precision.reduce_dtype,
                   .buffer_dtype = precision.buffer_dtype},
                  fn);
}

using ByTensor = std::unordered_map<const at::TensorImpl*, std::optional<at::ScalarType>>;

enum class Tensors { kParameters, kBuffers };

// What the modules choose for their tensors: `dtype`, which is called `name`. Of a tensor of several modules, the first
// one's choice; none if one of them keeps the precision, and that counts.
ByTensor chosen_dtypes(const torch::nn::Module& module, const MixedPrecision& precision, Tensors tensors,
                       std::optional<at::ScalarType> ModulePrecision::*dtype, const char* name, bool keeping_counts) {
  ByTensor chosen;
  for_each_module(module, precision, [&](const torch::nn::Module& each, const ModulePrecision& here, bool keeps) {
    if (here.*dtype) comm::validate_float(name, *(here.*dtype));
    const bool of_parameters = tensors == Tensors::kParameters;
    for (const auto& tensor : of_parameters ? each.parameters(/*recurse=*/false) : each.buffers(/*recurse=*/false)) {
      const auto [place, is_new] = chosen.try_emplace(tensor.unsafeGetTensorImpl(), here.*dtype);
      if (keeps && keeping_counts) place->second.reset();
    }
  });
  return chosen;
}

// Of floating-point buffers that do not keep their dtype.
std::vector<std::pair<at::Tensor, at::ScalarType>> buffers_to_convert(const torch::nn::Module& module,
                                                                      const MixedPrecision& precision) {
  ByTensor dtypes = chosen_dtypes(module, precision, Tensors::kBuffers, &ModulePrecision::buffer_dtype, "buffer_dtype",
                                  /*keeping_counts=*/true);
  std::vector<std::pair<at::Tensor, at::ScalarType>> all;
  for (const at::Tensor& buffer : module.buffers())
    if (buffer.defined() && buffer.is_floating_point())
      if (const auto& dtype = dtypes[buffer.unsafeGetTensorImpl()]) all.emplace_back(buffer, *dtype);
  return all;
}

at::Tensor view_of_copy(const at::Tensor& parameter, const at::Tensor& copy) {
  if (parameter._fw_grad(/*level=*/0).defined())
    throw InvalidArgument("forward-mode derivatives of a parameter are asked for, of which operators use a copy",
                          "Use backward(), or neither mixed precision nor a compute_device");
  at::Tensor view = at::empty({0}, copy.options());
  {
    const at::NoGradGuard no_grad;
    view.set_(copy.storage(), parameter.storage_offset(), parameter.sizes(), parameter.strides());
  }
  if (!parameter.is_inference() && !view.is_inference())
    engine::impl::set_version_counter(view, engine::impl::version_counter(parameter));
  if (at::GradMode::is_enabled() && parameter.requires_grad()) record_conversion(parameter, view);
  watch(view);  // nobody may change it
  return view;
}

}  // namespace

bool CopyPhase::is_time() const {
  return !copies.empty() && (reading || forwards > 0 || (is_step && in_second_call()));
}

at::Tensor CopyPhase::instead_of(const at::Tensor& parameter, at::ScalarType dtype, size_t number) const {
  if (parameter.scalar_type() != dtype || !is_time()) return {};
  if (on_device && in_backward() && !in_second_call() && std::this_thread::get_id() == forward_thread) {
    // Autograd computes on the CPU here, as a hook of a parameter does; what the device computes has a thread of its
    // own.
    if (is_spread(parameter))
      throw InvalidArgument(
          text("a hook reads parameter ", sharing_of(parameter)->name, " on the CPU, and may find it on another host"),
          "Read it in forward()");
    return {};
  }
  return view_of_copy(parameter, copies[number]);
}

void check(const MixedPrecision& precision) {
  const auto one = [](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype) comm::validate_float(text("mixed_precision.", name), *dtype);
  };
  one("param_dtype", precision.param_dtype);
  one("reduce_dtype", precision.reduce_dtype);
  one("buffer_dtype", precision.buffer_dtype);
  one("output_dtype", precision.output_dtype);
}

bool makes_copies(const MixedPrecision& precision) { return precision.param_dtype || precision.of_module; }

std::vector<at::ScalarType> compute_dtypes(const torch::nn::Module& module, const std::vector<NamedTensor>& parameters,
                                           const MixedPrecision& precision) {
  ByTensor chosen = chosen_dtypes(module, precision, Tensors::kParameters, &ModulePrecision::param_dtype, "param_dtype",
                                  /*keeping_counts=*/true);
  std::vector<at::ScalarType> dtypes;
  for (const auto& [name, tensor] : parameters) {
    const auto& dtype = chosen[tensor.unsafeGetTensorImpl()];
    dtypes.push_back(tensor.is_floating_point() && dtype ? *dtype : tensor.scalar_type());
  }
  return dtypes;
}

std::vector<std::optional<at::ScalarType>> reduce_dtypes(const torch::nn::Module& module,
                                                         const std::vector<NamedTensor>& parameters,
                                                         const MixedPrecision& precision) {
  ByTensor chosen = chosen_dtypes(module, precision, Tensors::kParameters, &ModulePrecision::reduce_dtype,
                                  "reduce_dtype", /*keeping_counts=*/false);
  std::vector<std::optional<at::ScalarType>> dtypes;
  for (const auto& [name, tensor] : parameters) dtypes.push_back(chosen[tensor.unsafeGetTensorImpl()]);
  return dtypes;
}

void convert_buffers(const torch::nn::Module& module, const MixedPrecision& precision) {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, dtype] : buffers_to_convert(module, precision)) buffer.set_data(buffer.to(dtype));
}

std::string words_of(const torch::nn::Module& module, const MixedPrecision& precision,
                     const std::vector<at::ScalarType>& compute_dtypes) {
  std::string words;
  const auto one = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype) words += text(" ", name, "=", c10::toString(*dtype));
  };
  one("param_dtype", precision.param_dtype);
  one("reduce_dtype", precision.reduce_dtype);
  one("buffer_dtype", precision.buffer_dtype);
  one("output_dtype", precision.output_dtype);
  words += text(" cast_forward_inputs=", precision.cast_forward_inputs, " compute=");
  for (const at::ScalarType dtype : compute_dtypes) words += text(c10::toString(dtype), ",");
  for (const auto& [buffer, dtype] : buffers_to_convert(module, precision))
    words += text(" [", join(buffer.sizes()), "] ", c10::toString(dtype));
  if (precision.of_module)
    for_each_module(module, precision, [&](const torch::nn::Module&, const ModulePrecision& here, bool) {
      one("reduce", here.reduce_dtype);
    });
  return words;
}

bool lacks_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() && tensor.scalar_type() != dtype;
}
void convert(at::Tensor& tensor, at::ScalarType dtype) {
  if (lacks_dtype(tensor, dtype)) tensor = tensor.to(dtype);
}

}  // namespace muster::parallel
