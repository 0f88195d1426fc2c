#include "rpc/values/quantized.h"

#include <ATen/ops/empty.h>
#include <ATen/quantized/QTensorImpl.h>
#include <ATen/quantized/Quantizer.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster/base/error.h"

namespace muster::rpc::detail {
namespace {

c10::Storage storage_of(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->storage(); }

void append(std::string& to, uint64_t bits) { to.append(reinterpret_cast<const char*>(&bits), sizeof bits); }
void append(std::string& to, double number) { append(to, std::bit_cast<uint64_t>(number)); }
double get_double(WireReader& body) { return std::bit_cast<double>(body.get<uint64_t>()); }

// One of the numbers that such a tensor has, as libtorch's operators expect.
int64_t get_zero_point(WireReader& body, at::ScalarType dtype) {
  const auto [least, most] = dtype == at::kQInt8    ? std::pair<int64_t, int64_t>(INT8_MIN, INT8_MAX)
                             : dtype == at::kQUInt8 ? std::pair<int64_t, int64_t>(0, UINT8_MAX)
                                                    : std::pair<int64_t, int64_t>(INT32_MIN, INT32_MAX);
  const auto number = body.get<int64_t>();
  if (number < least || number > most) throw CorruptError("a tensor of a message: a zero point out of range");
  return number;
}

void write_channels(const at::PerChannelAffineQuantizer& quantizer, bool has_float_zero_points, std::string& body) {
  body += static_cast<char>(quantizer.axis());
  const at::Tensor scales = quantizer.scales().to(at::kCPU, at::kDouble).contiguous();
  const at::Tensor zeros =
      quantizer.zero_points().to(at::kCPU, has_float_zero_points ? at::kDouble : at::kLong).contiguous();
  const auto* const scale = scales.const_data_ptr<double>();
  for (int64_t i = 0; i < scales.numel(); ++i) {
    append(body, scale[i]);
    if (has_float_zero_points)
      append(body, zeros.const_data_ptr<double>()[i]);
    else
      append(body, static_cast<uint64_t>(zeros.const_data_ptr<int64_t>()[i]));
  }
}

at::QuantizerPtr read_channels(WireReader& body, bool has_float_zero_points, const at::Tensor& integers,
                               at::ScalarType dtype) {
  const auto axis = body.get<uint8_t>();
  if (axis >= integers.dim()) throw CorruptError("a tensor of a message: no such axis");
  // One after the other, because the size of a tensor without elements may be any number.
  std::vector<double> scales, float_zeros;
  std::vector<int64_t> zeros;
  for (int64_t i = 0; i < integers.size(axis); ++i) {
    scales.push_back(get_double(body));
    if (has_float_zero_points)
      float_zeros.push_back(get_double(body));
    else
      zeros.push_back(get_zero_point(body, dtype));
  }
  const auto tensor_of = [](const auto& numbers, at::ScalarType type) {
    at::Tensor tensor = at::empty({static_cast<int64_t>(numbers.size())}, type);
    std::copy(numbers.begin(), numbers.end(),
              tensor.mutable_data_ptr<typename std::decay_t<decltype(numbers)>::value_type>());
    return tensor;
  };
  return at::make_per_channel_affine_quantizer(
      tensor_of(scales, at::kDouble),
      has_float_zero_points ? tensor_of(float_zeros, at::kDouble) : tensor_of(zeros, at::kLong), axis, dtype);
}

}  // namespace

bool quantized_travels(const at::Tensor& quantized) {
  const auto dtype = quantized.scalar_type();
  if (!quantized.is_cpu() || (dtype != at::kQInt8 && dtype != at::kQUInt8 && dtype != at::kQInt32)) return false;
  const auto quantizer = quantizer_of(quantized);
  if (dynamic_cast<const at::PerTensorAffineQuantizer*>(quantizer.get())) return true;
  const auto* const of_channels = dynamic_cast<const at::PerChannelAffineQuantizer*>(quantizer.get());
  // A view may have another axis than its quantizer says.
  return of_channels && of_channels->axis() >= 0 && of_channels->axis() < quantized.dim() &&
         of_channels->scales().numel() == quantized.size(of_channels->axis());
}

at::QuantizerPtr quantizer_of(const at::Tensor& quantized) { return at::get_qtensorimpl(quantized)->quantizer(); }

at::Tensor integers_of(const at::Tensor& quantized) {
  at::Tensor integers =
      at::detail::make_tensor<c10::TensorImpl>(storage_of(quantized), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                               c10::scalarTypeToTypeMeta(at::toUnderlying(quantized.scalar_type())));
  integers.unsafeGetTensorImpl()->set_sizes_and_strides(quantized.sizes(), quantized.strides(),
                                                        quantized.storage_offset());
  return integers;
}

void write_quantizer(at::Quantizer& quantizer, std::string& body) {
  const auto scheme = quantizer.qscheme();
  body += static_cast<char>(scheme);
  if (scheme != at::kPerTensorAffine)
    return write_channels(static_cast<const at::PerChannelAffineQuantizer&>(quantizer),
                          scheme == at::kPerChannelAffineFloatQParams, body);
  const auto& of_all = static_cast<const at::PerTensorAffineQuantizer&>(quantizer);
  append(body, of_all.scale());
  append(body, static_cast<uint64_t>(of_all.zero_point()));
}

at::Tensor read_quantized(WireReader& body, const at::Tensor& integers) {
  const auto dtype = at::toQIntType(integers.scalar_type());
  if (!integers.is_cpu() || dtype == integers.scalar_type())
    throw CorruptError("a tensor of a message: it cannot be a quantized one");
  const auto scheme = static_cast<c10::QScheme>(body.get<uint8_t>());
  at::QuantizerPtr quantizer;
  if (scheme == at::kPerTensorAffine) {
    const double scale = get_double(body);
    quantizer = at::make_per_tensor_affine_quantizer(scale, get_zero_point(body, dtype), dtype);
  } else if (scheme == at::kPerChannelAffine || scheme == at::kPerChannelAffineFloatQParams) {
    quantizer = read_channels(body, scheme == at::kPerChannelAffineFloatQParams, integers, dtype);
  } else {
    throw CorruptError("a tensor of a message: an unknown scheme of quantization");
  }
  at::Tensor quantized = at::detail::make_tensor<at::QTensorImpl>(
      storage_of(integers), c10::DispatchKeySet(c10::DispatchKey::QuantizedCPU), c10::scalarTypeToTypeMeta(dtype),
      std::move(quantizer));
  quantized.unsafeGetTensorImpl()->set_sizes_and_strides(integers.sizes(), integers.strides(),
                                                         integers.storage_offset());
  return quantized;
}

}  // namespace muster::rpc::detail
