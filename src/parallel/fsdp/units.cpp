#include "parallel/fsdp/units.h"

#include <map>
#include <optional>
#include <set>
#include <string>

namespace muster::fsdp {
namespace {

std::string module_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? std::string() : name.substr(0, dot);
}

// The innermost module around a parameter that is a unit.
std::optional<std::string> unit_around(std::string name, const std::set<std::string>& units) {
  while (!name.empty()) {
    name = module_of(name);
    if (units.count(name) != 0) return name;
  }
  return std::nullopt;
}

}  // namespace

std::vector<Unit> make_units(const torch::nn::Module& module, const std::vector<parallel::NamedTensor>& parameters,
                             size_t bytes, const std::function<bool(const torch::nn::Module&)>& is_unit) {
  std::set<std::string> chosen;
  if (is_unit) {
    if (is_unit(module)) chosen.insert("");
    for (const auto& inner : module.named_modules("", /*include_self=*/false))
      if (is_unit(*inner.value())) chosen.insert(inner.key());
  }
  // A bias stays with its weight: kernels ask for them in either order.
  const auto is_small_beside = [&](size_t i) {
    return i > 0 && 8 * parameters[i].tensor.nbytes() <= parameters[i - 1].tensor.nbytes() &&
           module_of(parameters[i].name) == module_of(parameters[i - 1].name);
  };
  std::vector<Unit> units;
  std::map<std::string, size_t> of_module;
  std::optional<size_t> open;  // of those without a module
  size_t filled = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const size_t size = parameters[i].tensor.nbytes();
    size_t unit = units.size();
    if (const auto around = unit_around(parameters[i].name, chosen)) {
      unit = of_module.emplace(*around, unit).first->second;
    } else if (open && (filled + size <= bytes || is_small_beside(i))) {
      unit = *open;
      filled += size;
    } else {
      open = unit;
      filled = size;
    }
    if (unit == units.size()) units.emplace_back();
    units[unit].push_back(i);
  }
  return units;
}

}  // namespace muster::fsdp
