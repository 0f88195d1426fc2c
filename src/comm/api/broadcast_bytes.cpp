#include "comm/api/broadcast_bytes.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace muster::comm {

at::Tensor broadcast_bytes(const at::Tensor& bytes, int64_t count, int root, const CollectiveOptions& options) {
  constexpr int64_t kPiece = int64_t{256} << 20;
  const Group group = options.group.resolved();
  const at::Tensor all = group.rank() == root ? bytes.narrow(0, 0, count) : at::empty({count}, at::kByte);
  for (int64_t at = 0; at < count; at += kPiece)
    broadcast(all.narrow(0, at, std::min(kPiece, count - at)), root, options);
  return all;
}

}  // namespace muster::comm
