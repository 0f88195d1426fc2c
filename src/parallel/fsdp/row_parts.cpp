#include "parallel/fsdp/row_parts.h"

#include <algorithm>

#include "base/text.h"

namespace muster::fsdp {
namespace {

// Of a tensor with these strides: the dimension of more than one element whose elements lie farthest apart; -1 if there
// is none.
int64_t outermost(const at::Tensor& tensor, const std::vector<int64_t>& strides) {
  int64_t found = -1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && (found < 0 || strides[static_cast<size_t>(dim)] > strides[static_cast<size_t>(found)]))
      found = dim;
  return found;
}

}  // namespace

std::vector<RowPart> divide_rows(const std::vector<parallel::NamedTensor>& parameters, size_t bytes) {
  std::vector<RowPart> parts;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    if (!tensor.requires_grad() || tensor.nbytes() <= bytes) continue;
    const auto strides = parallel::dense_strides(tensor);
    const int64_t dim = outermost(tensor, strides);
    if (dim < 0) continue;
    const int64_t rows = tensor.size(dim), row = tensor.numel() / rows;
    const auto row_bytes = static_cast<size_t>(row) * tensor.element_size();
    const auto rows_of_part = static_cast<int64_t>(std::max(bytes / row_bytes, size_t{1}));
    const int64_t count = (rows + rows_of_part - 1) / rows_of_part;
    for (int64_t k = 0; k < count; ++k) {
      const int64_t begin = rows * k / count, end = rows * (k + 1) / count;
      std::string before;  // ":," for each dimension before
      for (int64_t d = 0; d < dim; ++d) before += ":,";
      parts.push_back({.parameter = i,
                       .name = text(name, '[', before, begin, ':', end, ']'),
                       .range = {.dim = dim,
                                 .begin = begin,
                                 .count = end - begin,
                                 .offset = begin * row,
                                 .elements = (end - begin) * row}});
    }
  }
  return parts;
}

}  // namespace muster::fsdp
