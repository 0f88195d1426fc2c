#include "optim/line_search.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sqrt.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <array>
#include <utility>

namespace muster::optim {
namespace {

constexpr double kEnoughDecrease = 1e-4, kFlatEnough = 0.9;

// Where the cubic through two points, with their slopes, has its minimum, moved into [from, to]. Their middle if the
// cubic has none.
Number cubic_minimum(const LinePoint& a, const LinePoint& b, const Number& from, const Number& to) {
  const Number middle_slope = a.slope + b.slope - Number(3 * (a.loss - b.loss)) / (a.distance - b.distance);
  const Number square = middle_slope * middle_slope - a.slope * b.slope;
  if (!(square >= 0)) return (from + to) / 2;
  const Number root = sqrt(square);
  const auto [near, far] = a.distance <= b.distance ? std::pair(&a, &b) : std::pair(&b, &a);
  const Number minimum = far->distance - (far->distance - near->distance) * ((far->slope + root - middle_slope) /
                                                                             (far->slope - near->slope + 2 * root));
  return least(greatest(minimum, from), to);
}

struct Conditions {
  const LinePoint& start;
  bool decreases_enough(const LinePoint& point) const {
    return !(Number(point.loss) > start.loss + kEnoughDecrease * point.distance * start.slope);
  }
  bool is_flat_enough(const LinePoint& point) const { return abs(point.slope) <= -kFlatEnough * start.slope; }
};

}  // namespace

double Number::rounded(double value, at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return static_cast<float>(value);
    case at::kHalf:
      return static_cast<c10::Half>(static_cast<float>(value));
    case at::kBFloat16:
      return static_cast<c10::BFloat16>(static_cast<float>(value));
    default:
      return value;
  }
}

Number sqrt(const Number& a) {
  if (!a.dtype_) return std::sqrt(a.value_);
  return {at::scalar_tensor(a.value_, *a.dtype_).sqrt().item<double>(), *a.dtype_};
}

LinePoint strong_wolfe_search(const std::function<LinePoint(const Number& distance)>& evaluate, const LinePoint& start,
                              const Number& first, const Number& largest, double tolerance, int64_t max_iterations) {
  const Conditions conditions{start};
  LinePoint point = evaluate(first), before = start;
  int64_t iterations = 0;
  // Goes on until a minimum with the conditions must lie between two points.
  std::array<LinePoint, 2> bracket{start, start};
  for (;; ++iterations) {
    if (iterations >= max_iterations) {
      bracket = {start, point};
      break;
    }
    const bool is_too_far = !conditions.decreases_enough(point) || (iterations > 1 && point.loss >= before.loss);
    if (!is_too_far && conditions.is_flat_enough(point)) return point;
    if (is_too_far || point.slope >= 0) {
      bracket = {before, point};
      break;
    }
    const Number least_distance = point.distance + 0.01 * (point.distance - before.distance);
    const Number next = cubic_minimum(before, point, least_distance, point.distance * 10);
    before = std::exchange(point, evaluate(next));
  }

  // Makes the bracket smaller. `low`: which of its ends has the lower loss.
  size_t low = bracket[0].loss <= bracket[1].loss ? 0 : 1;
  for (bool was_near_an_end = false; iterations < max_iterations; ++iterations) {
    if (abs(bracket[1].distance - bracket[0].distance) * largest < tolerance) break;
    const Number from = least(bracket[0].distance, bracket[1].distance);
    const Number to = greatest(bracket[0].distance, bracket[1].distance);
    Number next = cubic_minimum(bracket[0], bracket[1], from, to);
    // The second time in a row that it is close to an end, or if it is at one, go a tenth of the bracket away from it.
    const Number tenth = 0.1 * (to - from);
    bool is_near_an_end = least(to - next, next - from) < tenth;
    if (is_near_an_end && (was_near_an_end || next >= to || next <= from)) {
      next = abs(next - to) < abs(next - from) ? to - tenth : from + tenth;
      is_near_an_end = false;
    }
    was_near_an_end = is_near_an_end;

    point = evaluate(next);
    LinePoint &lower = bracket[low], &higher = bracket[1 - low];
    if (!conditions.decreases_enough(point) || point.loss >= lower.loss) {
      higher = point;
      low = bracket[0].loss <= bracket[1].loss ? 0 : 1;
      continue;
    }
    const bool is_done = conditions.is_flat_enough(point);
    if (!is_done && point.slope * (higher.distance - lower.distance) >= 0) higher = lower;
    lower = point;
    if (is_done) return lower;
  }
  return bracket[low];
}

}  // namespace muster::optim
