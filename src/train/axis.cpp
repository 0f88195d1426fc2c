#include "train/axis.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

namespace muster::plot {

std::string fixed(double value, int decimals) {
  std::array<char, 400> buffer;  // the longest double has 309 digits before the point
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::fixed, decimals).ptr;
  std::string out(buffer.data(), end);
  return out.find_first_not_of("-0.") == std::string::npos && out[0] == '-' ? out.substr(1) : out;  // no -0
}

std::string general(double value, int digits) {
  std::array<char, 64> buffer;
  return {buffer.data(),
          std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::general, digits).ptr};
}

std::string Axis::label(double tick) const {
  const double largest = std::max(std::abs(low), std::abs(high));
  return largest < 1e6 && decimals <= 5 ? fixed(tick, decimals) : general(tick, 4);
}

Axis make_axis(double low, double high, int count, bool round_out) {
  if (low > high) std::swap(low, high);
  // The ends are too close together for numbers of this size: widen the range around them.
  if (const double size = std::max(std::abs(low), std::abs(high)); high - low <= size * 1e-9) {
    const double half = size > 0 ? size * 0.1 : 0.5;
    low -= half;
    high += half;
  }
  const double raw = (high - low) / count;
  const double power = std::pow(10, std::floor(std::log10(raw)));
  const double step = power * (raw <= power ? 1 : raw <= 2 * power ? 2 : raw <= 5 * power ? 5 : 10);

  Axis axis;
  // 1e-6 of a step allows for the rounding of the division.
  double first = std::ceil(low / step - 1e-6), last = std::floor(high / step + 1e-6);
  if (round_out) {
    first = std::floor(low / step + 1e-6);
    last = std::ceil(high / step - 1e-6);
  }
  axis.low = round_out ? first * step : low;
  axis.high = round_out ? last * step : high;
  for (double multiple = first; multiple <= last; ++multiple) axis.ticks.push_back(multiple * step);
  axis.decimals = std::max(0, -static_cast<int>(std::floor(std::log10(step) + 1e-9)));
  return axis;
}

}  // namespace muster::plot
