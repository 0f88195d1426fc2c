// Checks of options. They throw InvalidArgument, which names the option, its value and what it must be. Thread-safety:
// functions of their arguments.
#pragma once

#include <cmath>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::optim {

inline void require(bool fine, const char* name, double value, const char* what) {
  if (!fine) throw InvalidArgument(text(name, ": expected ", what, ", got ", value));
}

inline double at_least(const char* name, double value, double least) {
  require(std::isfinite(value) && value >= least, name, value, "a finite number of 0 or more");
  return value;
}

inline void check_betas(double beta1, double beta2) {
  require(beta1 >= 0 && beta1 < 1, "betas.first", beta1, "a number of 0 or more and below 1");
  require(beta2 >= 0 && beta2 < 1, "betas.second", beta2, "a number of 0 or more and below 1");
}

// The options of Adam, or of one of its relatives.
template <typename Options>
Options with_checked_betas(Options options) {
  check_betas(options.betas.first, options.betas.second);
  at_least("eps", options.eps, 0);
  at_least("weight_decay", options.weight_decay, 0);
  return options;
}

}  // namespace muster::optim
