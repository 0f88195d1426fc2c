#include "parallel/batch_norm/batch_norm_gradient.h"

#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <cstdint>
#include <vector>

namespace muster::parallel {
namespace {

constexpr int64_t kGrain = 32 << 10;  // elements, at least, for each thread

// A tensor is `outer` times `channels` times `inner` elements, one after another.
struct Shape {
  int64_t outer, channels, inner;
};

template <typename Scalar, typename Math>
struct Arguments {
  const Scalar *gradient, *input;
  Scalar* result;
  const Math *scale, *shift, *mean, *slope;
};

template <typename Scalar, typename Math>
void channels_apart(const Arguments<Scalar, Math>& all, const Shape& shape, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t c = row % shape.channels;
    const Math scale = all.scale[c], shift = all.shift[c], mean = all.mean[c], slope = all.slope[c];
    const Scalar* __restrict const gradient = all.gradient + row * shape.inner;
    const Scalar* __restrict const input = all.input + row * shape.inner;
    Scalar* __restrict const result = all.result + row * shape.inner;
    for (int64_t i = 0; i < shape.inner; ++i)
      result[i] = static_cast<Scalar>(
          scale * (static_cast<Math>(gradient[i]) - shift - (static_cast<Math>(input[i]) - mean) * slope));
  }
}

template <typename Scalar, typename Math>
void channels_last(const Arguments<Scalar, Math>& all, const Shape& shape, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const Scalar* __restrict const gradient = all.gradient + row * shape.channels;
    const Scalar* __restrict const input = all.input + row * shape.channels;
    Scalar* __restrict const result = all.result + row * shape.channels;
    for (int64_t c = 0; c < shape.channels; ++c)
      result[c] = static_cast<Scalar>(all.scale[c] * (static_cast<Math>(gradient[c]) - all.shift[c] -
                                                      (static_cast<Math>(input[c]) - all.mean[c]) * all.slope[c]));
  }
}

at::Tensor composed(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& scale,
                    const at::Tensor& shift, const at::Tensor& mean, const at::Tensor& slope) {
  std::vector<int64_t> sizes(static_cast<size_t>(input.dim()), 1);
  sizes[1] = input.size(1);
  const auto wide = [&](const at::Tensor& tensor) { return tensor.view(sizes); };
  return (wide(scale) * (gradient - wide(shift) - (input - wide(mean)) * wide(slope))).to(input.scalar_type());
}

}  // namespace

at::Tensor batch_norm_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& scale,
                               const at::Tensor& shift, const at::Tensor& mean, const at::Tensor& slope) {
  if (!input.device().is_cpu()) return composed(gradient, input, scale, shift, mean, slope);
  const at::MemoryFormat format = input.suggest_memory_format();
  const at::Tensor x = input.contiguous(format), dy = gradient.contiguous(format);
  const at::Tensor result = at::empty_like(x, format);
  if (x.numel() == 0) return result;
  const int64_t channels = x.size(1), rest = x.numel() / channels;
  const bool is_last = format != at::MemoryFormat::Contiguous || x.dim() == 2;
  const Shape shape = is_last ? Shape{rest, channels, 1} : Shape{x.size(0), channels, rest / x.size(0)};
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, x.scalar_type(), "batch_norm_gradient", [&] {
    using Math = at::opmath_type<scalar_t>;
    const Arguments<scalar_t, Math> all{dy.const_data_ptr<scalar_t>(),       x.const_data_ptr<scalar_t>(),
                                        result.mutable_data_ptr<scalar_t>(), scale.const_data_ptr<Math>(),
                                        shift.const_data_ptr<Math>(),        mean.const_data_ptr<Math>(),
                                        slope.const_data_ptr<Math>()};
    const int64_t rows = is_last ? shape.outer : shape.outer * channels;
    const int64_t elements_per_row = x.numel() / rows;
    at::parallel_for(0, rows, std::max<int64_t>(1, kGrain / elements_per_row), [&](int64_t begin, int64_t end) {
      (is_last ? channels_last<scalar_t, Math> : channels_apart<scalar_t, Math>)(all, shape, begin, end);
    });
  });
  return result;
}

}  // namespace muster::parallel
