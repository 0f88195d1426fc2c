#include "parallel/modules/balance.h"

#include <algorithm>

#include "parallel/kit/gradient_blocks.h"

namespace muster::parallel {

Balance::Balance(int owners) {
  for (auto& bytes : bytes_) bytes.resize(static_cast<size_t>(owners));
}

std::vector<int> Balance::divide(const std::vector<NamedTensor>& parameters, size_t group_bytes) {
  std::vector<int> owners(parameters.size());
  for (const bool trained : {true, false}) {
    struct Item {
      std::vector<size_t> parameters;
      size_t bytes = 0;
      bool closed = false;
    };
    auto& load = bytes_[trained ? 1 : 0];
    std::vector<Item> items;
    size_t total = 0;
    for (const auto& parameter : parameters)
      if (parameter.tensor.requires_grad() == trained) total += parameter.tensor.nbytes();
    const size_t limit = std::min(group_bytes, total / (4 * load.size()));
    for (size_t i = parameters.size(); i-- > 0;) {  // gradients come from the last to the first
      const at::Tensor& tensor = parameters[i].tensor;
      if (tensor.requires_grad() != trained) continue;
      const bool large = tensor.nbytes() >= GradientBlocks::kLarge;
      if (items.empty() || items.back().closed || large || items.back().bytes + tensor.nbytes() > limit)
        items.push_back({.closed = large});
      items.back().parameters.push_back(i);
      items.back().bytes += tensor.nbytes();
    }
    // The largest first, each to the owner that has least.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.bytes > b.bytes; });
    for (const Item& item : items) {
      const auto least = std::min_element(load.begin(), load.end());
      *least += item.bytes;
      for (const size_t i : item.parameters) owners[i] = static_cast<int>(least - load.begin());
    }
  }
  return owners;
}

}  // namespace muster::parallel
