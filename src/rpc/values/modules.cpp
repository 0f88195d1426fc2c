#include "muster/rpc/modules.h"

#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <sstream>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/function.h"

namespace muster::rpc {
namespace {

using Named = std::vector<std::pair<std::string, at::Tensor>>;
using Dict = torch::OrderedDict<std::string, at::Tensor>;

Named listed(const Dict& dict) {
  Named named;
  named.reserve(dict.size());
  for (const auto& item : dict) named.emplace_back(item.key(), item.value());
  return named;
}

std::string shape(const at::Tensor& tensor) {
  return tensor.defined() ? text(tensor.sizes(), " ", tensor.scalar_type()) : "undefined";
}

void check(const char* kind, const Dict& mine, const Named& given) {
  for (const auto& [name, tensor] : given) {
    const at::Tensor* const own = mine.find(name);
    if (!own) throw Mismatch(text("the module has no ", kind, " '", name, "', which the state has"));
    if (own->defined() != tensor.defined() || (tensor.defined() && own->sizes() != tensor.sizes()))
      throw Mismatch(text("the state's ", kind, " '", name, "': expected ", shape(*own), ", as the module's, got ",
                          shape(tensor)));
  }
  for (const auto& item : mine)
    if (std::none_of(given.begin(), given.end(), [&](const auto& each) { return each.first == item.key(); }))
      throw Mismatch(text("the state has no ", kind, " '", item.key(), "', which the module has"));
  if (given.size() != mine.size()) throw Mismatch(text("the state has a ", kind, " twice"));
}

void copy(const Dict& mine, const Named& given) {
  const torch::NoGradGuard no_grad;
  for (const auto& [name, tensor] : given)
    if (tensor.defined()) at::Tensor(*mine.find(name)).copy_(tensor);
}

}  // namespace

ModuleState state_of(const torch::nn::Module& module) {
  return {listed(module.named_parameters()), listed(module.named_buffers()), module.is_training()};
}

void load(torch::nn::Module& module, const ModuleState& state) {
  const Dict parameters = module.named_parameters(), buffers = module.named_buffers();
  check("parameter", parameters, state.parameters);
  check("buffer", buffers, state.buffers);
  copy(parameters, state.parameters);
  copy(buffers, state.buffers);
  module.train(state.training);
}

}  // namespace muster::rpc
