// Scales of a chart: the round numbers between two values, and their labels.
//
// Thread-safety: values.
#pragma once

#include <string>
#include <vector>

namespace muster::plot {

// Numbers as text by std::to_chars, which, unlike printf, does not depend on the program's locale.
std::string fixed(double value, int decimals);
std::string general(double value, int digits);  // at most so many significant digits; 1e+07 if that is shorter

struct Axis {
  double low = 0, high = 1;   // low < high
  std::vector<double> ticks;  // multiples of 1, 2 or 5 times a power of ten, within low..high
  int decimals = 0;           // as many as it takes to tell the ticks apart

  double fraction(double value) const { return (value - low) / (high - low); }
  std::string label(double tick) const;
};

// An axis over low..high (in any order, equal or not) with about `count` ticks. `round_out`: the axis ends at ticks.
Axis make_axis(double low, double high, int count, bool round_out);

}  // namespace muster::plot
