#include "parallel/compute_copy.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/batchnorm.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/shared_tensor.h"
#include "parallel/watched.h"

namespace muster::parallel {
namespace {

namespace engine = torch::autograd;

// Backward of the conversion.
class Conversion final : public engine::Node {
 public:
  Conversion(engine::edge_list next, at::ScalarType dtype) : Node(std::move(next)), dtype_(dtype) {}
  engine::variable_list apply(engine::variable_list&& gradients) override {
    if (!gradients[0].defined()) return {at::Tensor()};
    return {gradients[0].to(dtype_)};
  }
  std::string name() const override { return "MusterParameterConversion"; }

 private:
  const at::ScalarType dtype_;
};

bool keeps_dtype(const torch::nn::Module& module, const MixedPrecision& precision) {
  namespace nn = torch::nn;
  if (dynamic_cast<const nn::BatchNorm1dImpl*>(&module) || dynamic_cast<const nn::BatchNorm2dImpl*>(&module) ||
      dynamic_cast<const nn::BatchNorm3dImpl*>(&module))
    return true;
  return precision.full_precision && precision.full_precision(module);
}

void for_each_module(const torch::nn::Module& module, const auto& fn) {
  fn(module);
  for (const auto& child : module.children()) for_each_module(*child, fn);
}

}  // namespace

at::Tensor view_of_copy(const at::Tensor& parameter, const at::Tensor& copy) {
  at::Tensor view = at::empty({0}, copy.options());
  {
    const at::NoGradGuard no_grad;
    view.set_(copy.storage(), parameter.storage_offset(), parameter.sizes(), parameter.strides());
  }
  if (!parameter.is_inference() && !view.is_inference())
    engine::impl::set_version_counter(view, engine::impl::version_counter(parameter));
  if (at::GradMode::is_enabled() && parameter.requires_grad()) {
    auto next = engine::collect_next_edges(parameter);
    const auto node = c10::make_intrusive<Conversion>(std::move(next), parameter.scalar_type());
    engine::set_history(view, node);
  }
  if (is_spread(view)) watch(view);
  return view;
}

void check(const MixedPrecision& precision) {
  const auto one = [](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype && !at::isFloatingType(*dtype))
      throw InvalidArgument(text("mixed_precision.", name, " is ", c10::toString(*dtype)),
                            "Use a floating-point type, such as torch::kBFloat16");
  };
  one("param_dtype", precision.param_dtype);
  one("reduce_dtype", precision.reduce_dtype);
  one("buffer_dtype", precision.buffer_dtype);
  one("output_dtype", precision.output_dtype);
}

std::vector<at::ScalarType> compute_dtypes(const torch::nn::Module& module, const std::vector<NamedTensor>& parameters,
                                           const MixedPrecision& precision) {
  std::vector<at::ScalarType> dtypes;
  for (const auto& [name, tensor] : parameters) {
    const bool is_longer = precision.param_dtype && at::isFloatingType(tensor.scalar_type()) &&
                           c10::elementSize(tensor.scalar_type()) > c10::elementSize(*precision.param_dtype);
    dtypes.push_back(is_longer ? *precision.param_dtype : tensor.scalar_type());
  }
  if (!precision.param_dtype) return dtypes;
  for_each_module(module, [&](const torch::nn::Module& each) {
    if (!keeps_dtype(each, precision)) return;
    for (const auto& kept : each.parameters(/*recurse=*/false))
      for (size_t i = 0; i < parameters.size(); ++i)
        if (parameters[i].tensor.is_same(kept)) dtypes[i] = kept.scalar_type();
  });
  return dtypes;
}

void convert_buffers(const torch::nn::Module& module, const MixedPrecision& precision) {
  if (!precision.buffer_dtype) return;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> kept;
  for_each_module(module, [&](const torch::nn::Module& each) {
    if (!keeps_dtype(each, precision)) return;
    for (const auto& buffer : each.buffers(/*recurse=*/false)) kept.push_back(buffer);
  });
  for (const at::Tensor& buffer : module.buffers()) {
    if (!buffer.defined() || !at::isFloatingType(buffer.scalar_type())) continue;
    if (std::any_of(kept.begin(), kept.end(), [&](const at::Tensor& other) { return other.is_same(buffer); })) continue;
    buffer.set_data(buffer.to(*precision.buffer_dtype));
  }
}

std::string words_of(const MixedPrecision& precision, const std::vector<at::ScalarType>& compute_dtypes) {
  std::string words;
  const auto one = [&](const char* name, const std::optional<at::ScalarType>& dtype) {
    if (dtype) words += text(" ", name, "=", c10::toString(*dtype));
  };
  one("param_dtype", precision.param_dtype);
  one("reduce_dtype", precision.reduce_dtype);
  one("buffer_dtype", precision.buffer_dtype);
  if (!precision.param_dtype) return words;
  words += " compute=";
  for (const at::ScalarType dtype : compute_dtypes) words += text(c10::toString(dtype), ",");
  return words;
}

at::Tensor with_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() && tensor.is_floating_point() ? tensor.to(dtype) : tensor;
}

}  // namespace muster::parallel
