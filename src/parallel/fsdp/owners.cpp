#include "parallel/fsdp/owners.h"

#include <algorithm>

#include "parallel/gradient_blocks.h"

namespace muster::fsdp {

std::vector<int> balanced_places(const std::vector<parallel::NamedTensor>& parameters, int owners, size_t group_bytes) {
  std::vector<int> places(parameters.size());
  for (const bool trained : {true, false}) {
    struct Item {
      std::vector<size_t> parameters;
      size_t bytes = 0;
      bool closed = false;
    };
    std::vector<Item> items;
    size_t total = 0;
    for (const auto& parameter : parameters)
      if (parameter.tensor.requires_grad() == trained) total += parameter.tensor.nbytes();
    const size_t limit = std::min(group_bytes, total / (4 * static_cast<size_t>(owners)));
    for (size_t i = parameters.size(); i-- > 0;) {  // gradients come from the last to the first
      const at::Tensor& tensor = parameters[i].tensor;
      if (tensor.requires_grad() != trained) continue;
      const bool large = tensor.nbytes() >= parallel::GradientBlocks::kLarge;
      if (items.empty() || items.back().closed || large || items.back().bytes + tensor.nbytes() > limit)
        items.push_back({.closed = large});
      items.back().parameters.push_back(i);
      items.back().bytes += tensor.nbytes();
    }
    // The largest first, each to the rank that has least.
    std::stable_sort(items.begin(), items.end(), [](const Item& a, const Item& b) { return a.bytes > b.bytes; });
    std::vector<size_t> load(static_cast<size_t>(owners));
    for (const Item& item : items) {
      const auto least = std::min_element(load.begin(), load.end());
      *least += item.bytes;
      for (const size_t i : item.parameters) places[i] = static_cast<int>(least - load.begin());
    }
  }
  return places;
}

}  // namespace muster::fsdp
