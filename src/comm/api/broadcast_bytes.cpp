#include "comm/api/broadcast_bytes.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>

namespace muster::comm {
namespace {

constexpr int kTag = (1 << 28) - 1;  // above those of users

void in_pieces(const at::Tensor& all, const std::function<void(const at::Tensor& piece)>& move) {
  constexpr int64_t kPiece = int64_t{256} << 20;
  for (int64_t at = 0; at < all.numel(); at += kPiece) move(all.narrow(0, at, std::min(kPiece, all.numel() - at)));
}

}  // namespace

at::Tensor broadcast_bytes(const at::Tensor& bytes, int64_t count, int root, const CollectiveOptions& options) {
  const Group group = options.group.resolved();
  const at::Tensor all = group.rank() == root ? bytes.narrow(0, 0, count) : at::empty({count}, at::kByte);
  in_pieces(all, [&](const at::Tensor& piece) { broadcast(piece, root, options); });
  return all;
}

at::Tensor pass_bytes(const at::Tensor& bytes, int64_t count, int from, int to, const CollectiveOptions& options) {
  const Group group = options.group.resolved();
  const MessageOptions message{.tag = kTag, .group = options.group, .timeout = options.timeout};
  if (group.rank() == from) {
    in_pieces(bytes.narrow(0, 0, count), [&](const at::Tensor& piece) { send(piece, to, message); });
    return {};
  }
  const at::Tensor all = at::empty({count}, at::kByte);
  in_pieces(all, [&](const at::Tensor& piece) { recv(piece, from, message); });
  return all;
}

}  // namespace muster::comm
