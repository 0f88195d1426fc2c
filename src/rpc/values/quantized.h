// Quantized tensors on the wire: their integers, which travel as any tensor, and after them the numbers that say what
// the integers stand for.
//
//   u8 scheme     f64 scale, i64 zero point                            of all elements; or
//                 u8 axis, then for each place on it f64 scale, and    of each channel
//                 i64 zero point (f64 if the scheme has such)
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/QuantizerBase.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "base/byte_stream.h"

namespace muster::rpc::detail {

// Whether it is on the CPU, of whole bytes, and has a scale for all elements or for each channel of its axis.
bool quantized_travels(const at::Tensor& quantized);
at::QuantizerPtr quantizer_of(const at::Tensor& quantized);
// In the same memory.
at::Tensor integers_of(const at::Tensor& quantized);

void write_quantizer(at::Quantizer& quantizer, std::string& body);
// The quantized tensor in the memory of these integers. CorruptError: the numbers do not suit them.
at::Tensor read_quantized(WireReader& body, const at::Tensor& integers);

}  // namespace muster::rpc::detail
