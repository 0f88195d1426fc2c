// Optimizers with options drawn at random: the expression that makes TorchOpt's, and ours with the same numbers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "muster/optim/transform.h"
#include "support/dice.h"

namespace muster::test {

struct TransformCase {
  std::string torchopt;  // functional: adam(lr=0.1, …)
  std::string name;      // of the function, without options
  std::function<optim::GradientTransformation()> make;
};

std::vector<TransformCase> transform_cases();

// The elements of all tensors, one after the other.
std::vector<double> numbers(const std::vector<at::Tensor>& tensors);

}  // namespace muster::test
