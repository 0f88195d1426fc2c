// The graph of a computation, to look at: what autograd recorded, with the names of parameters and steps.
//
//   optim::NamedTensors names;
//   const auto note = [&](const std::string& when) {
//     for (const auto& [name, it] : optim::extract_state_dict(*net).parameters) names.emplace_back(when + name, it);
//   };
//   note("start.");  inner.step(loss(net));  note("step 1.");  …
//   optim::write_dot("graph.svg", {outer_loss}, names);
//
// make_dot() returns the graph in the language DOT: a box per recorded operation, an ellipse per named tensor and per
// leaf, a double ellipse per result; arrows go with the computation. The text is the same for the same graph.
//
// write_dot() writes it to a file, and returns the path of the file. A path that ends in .svg gets a picture, which
// Graphviz draws. If there is no Graphviz (Debian: graphviz), the graph is written to graph.svg.dot instead, and a
// warning says so.
//
// Errors: InvalidArgument: a result that is undefined, a file that cannot be written. Unavailable: Graphviz cannot be
// started. Thread-safety: the graph must not be used up meanwhile. Source: torchopt.visual.make_dot, torchviz.
#pragma once

#include <string>

#include "muster/optim/meta.h"

namespace muster::optim {

std::string make_dot(const Tensors& results, const NamedTensors& names = {});
std::string write_dot(const std::string& path, const Tensors& results, const NamedTensors& names = {});

}  // namespace muster::optim
