// How far muster::LBFGS goes along a direction, in the arithmetic of Python's torch.optim.LBFGS.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <compare>
#include <cstdint>
#include <functional>
#include <optional>

namespace muster::optim {

// A number of torch.optim.LBFGS, which is a float of Python or a tensor without dimensions. Operations of floats are
// those of doubles. An operation in which one of the two is a tensor has the tensor's dtype: it rounds its operands and
// its result. (Tensors are float32 or float64 here: of half and bfloat16, whose operands ATen takes as float32, the
// last bits may differ.) In float32 this decides which way a line search goes, so parameters that are computed in
// doubles differ from Python's by 1e-2 after 100 steps.
class Number {
 public:
  Number(double value) : value_(value) {}  // NOLINT(google-explicit-constructor): a float
  Number(double value, at::ScalarType dtype) : value_(rounded(value, dtype)), dtype_(dtype) {}
  explicit Number(const at::Tensor& tensor) : Number(tensor.item<double>(), tensor.scalar_type()) {}

  double value() const { return value_; }

  friend Number operator+(const Number& a, const Number& b) {
    return with(a, b, [](double x, double y) { return x + y; });
  }
  friend Number operator-(const Number& a, const Number& b) {
    return with(a, b, [](double x, double y) { return x - y; });
  }
  friend Number operator*(const Number& a, const Number& b) {
    return with(a, b, [](double x, double y) { return x * y; });
  }
  friend Number operator/(const Number& a, const Number& b) {
    if (!a.dtype_ && b.dtype_) return a * Number(1 / b.value_, *b.dtype_);  // as Tensor.__rtruediv__ does
    return with(a, b, [](double x, double y) { return x / y; });
  }
  friend Number operator-(const Number& a) { return a * -1; }
  friend Number abs(const Number& a) { return a.like(std::abs(a.value_)); }
  friend Number sqrt(const Number& a);  // that of a tensor is libtorch's, whose last bit may differ from std::sqrt()'s
  // With NaN all comparisons are false.
  friend std::partial_ordering operator<=>(const Number& a, const Number& b) {
    const auto dtype = a.dtype_ ? a.dtype_ : b.dtype_;
    return dtype ? rounded(a.value_, *dtype) <=> rounded(b.value_, *dtype) : a.value_ <=> b.value_;
  }

 private:
  static double rounded(double value, at::ScalarType dtype);
  Number like(double value) const { return dtype_ ? Number(value, *dtype_) : Number(value); }
  template <typename Operation>
  static Number with(const Number& a, const Number& b, const Operation& operation) {
    const auto dtype = a.dtype_ ? a.dtype_ : b.dtype_;
    if (!dtype) return operation(a.value_, b.value_);
    return {operation(rounded(a.value_, *dtype), rounded(b.value_, *dtype)), *dtype};
  }

  double value_;
  std::optional<at::ScalarType> dtype_;  // none: a float of Python
};

// Python's min() and max(): the first one if none is less or greater.
inline Number least(const Number& a, const Number& b) { return b < a ? b : a; }
inline Number greatest(const Number& a, const Number& b) { return b > a ? b : a; }

// The loss at some distance along the direction.
struct LinePoint {
  Number distance;  // in lengths of the direction
  double loss;
  at::Tensor gradient;  // flat
  Number slope;         // gradient times direction
};

// A point at which the loss has decreased enough and the slope is flat enough: the strong Wolfe conditions with 1e-4
// and 0.9. Or, when max_iterations are over or no element of the parameters would change by more than `tolerance`, the
// better end of the interval that is left. `start` is at distance 0, and `largest` is the direction's largest element.
// Calls `evaluate` 1 to max_iterations + 1 times, first at the distance `first`. Source: algorithms 3.5 and 3.6 of
// Nocedal and Wright; the constants and the limits of each try are those of torch.optim.LBFGS.
LinePoint strong_wolfe_search(const std::function<LinePoint(const Number& distance)>& evaluate, const LinePoint& start,
                              const Number& first, const Number& largest, double tolerance, int64_t max_iterations);

}  // namespace muster::optim
