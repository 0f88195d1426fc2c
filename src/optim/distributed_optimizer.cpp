#include "muster/optim/distributed_optimizer.h"

#include <algorithm>
#include <charconv>
#include <memory>
#include <set>

#include "autograd/passes/context.h"
#include "muster/base/error.h"

namespace muster::optim {

std::vector<ParameterRef> parameter_rrefs(const std::vector<at::Tensor>& parameters) {
  std::vector<ParameterRef> all;
  for (const at::Tensor& one : parameters) all.push_back(rpc::make_rref(std::make_shared<at::Tensor>(one)));
  return all;
}

namespace detail {
namespace {

// Splits "12.exp_avg" into 12 and ".exp_avg".
std::pair<size_t, std::string> parts(const std::string& name) {
  size_t place = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), place);
  if (error != std::errc() || end == name.data() + name.size() || *end != '.')
    throw InvalidArgument("'" + name + "' does not begin with the index of a parameter and a point");
  return {place, std::string(end, name.data() + name.size())};
}

}  // namespace

std::vector<Share> shares_of(const std::vector<ParameterRef>& parameters) {
  if (parameters.empty()) throw InvalidArgument("an optimizer needs at least one parameter");
  std::map<int, Share> by_owner;
  std::set<std::pair<int, uint64_t>> seen;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i]) throw InvalidArgument("the reference to parameter " + std::to_string(i) + " is empty");
    const int owner = parameters[i].owner().id;
    if (!seen.emplace(owner, rpc::detail::object_of(*parameters[i].reference())).second)
      throw InvalidArgument("parameter " + std::to_string(i) + " is in the list twice");
    Share& share = by_owner[owner];
    share.owner = owner;
    share.parameters.push_back(parameters[i]);
    share.places.push_back(i);
  }
  std::vector<Share> all;
  for (auto& [owner, share] : by_owner) all.push_back(std::move(share));
  return all;
}

std::vector<at::Tensor> tensors_of(const std::vector<ParameterRef>& parameters) {
  std::vector<at::Tensor> all;
  std::set<const at::TensorImpl*> seen;
  for (const ParameterRef& one : parameters) {
    all.push_back(*one.local_value());
    if (!all.back().defined()) throw InvalidArgument("a parameter is an undefined tensor");
    if (!seen.insert(all.back().unsafeGetTensorImpl()).second)
      throw InvalidArgument("two references in the list refer to the same parameter");
  }
  return all;
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& parameters, bool lent) {
  const auto context = autograd::current_context();
  if (context && lent) return context->lend_gradients(parameters);
  std::vector<at::Tensor> all;
  all.reserve(parameters.size());
  for (const at::Tensor& one : parameters) all.push_back(autograd::gradient(one));
  return all;
}

State renamed(const State& state, const std::vector<size_t>& places) {
  State all;
  for (const auto& [name, tensor] : state) {
    const auto [place, rest] = parts(name);
    all[std::to_string(places.at(place)) + rest] = tensor;
  }
  return all;
}

State part_of(const State& state, const std::vector<size_t>& places, size_t count) {
  State part;
  for (const auto& [name, tensor] : state) {
    const auto [place, rest] = parts(name);
    if (place >= count)
      throw InvalidArgument("'" + name + "' is of a parameter that does not exist: the number of parameters is " +
                            std::to_string(count));
    const auto found = std::lower_bound(places.begin(), places.end(), place);
    if (found != places.end() && *found == place) part[std::to_string(found - places.begin()) + rest] = tensor;
  }
  return part;
}

}  // namespace detail
}  // namespace muster::optim
