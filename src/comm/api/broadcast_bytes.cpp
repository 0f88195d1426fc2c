#include "comm/api/broadcast_bytes.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <utility>

#include "comm/world/group_state.h"

namespace muster::comm {
namespace {

constexpr int kTag = (1 << 28) - 1;  // above those of users

void in_pieces(const at::Tensor& all, const std::function<void(const at::Tensor& piece)>& move) {
  constexpr int64_t kPiece = int64_t{256} << 20;
  for (int64_t at = 0; at < all.numel(); at += kPiece) move(all.narrow(0, at, std::min(kPiece, all.numel() - at)));
}

}  // namespace

void broadcast_bytes(const at::Tensor& bytes, int root, const CollectiveOptions& options) {
  in_pieces(bytes, [&](const at::Tensor& piece) { broadcast(piece, root, options); });
}

void pass_together(const std::vector<BytesMessage>& messages, const CollectiveOptions& options) {
  if (messages.empty()) return;
  std::vector<Operation> operations;
  for (const auto& [bytes, peer, is_sent] : messages)
    operations.push_back({.kind = is_sent ? OpKind::kSend : OpKind::kRecv,
                          .peer = peer,
                          .tag = kTag,
                          .tensor = bytes,
                          .timeout = options.timeout,
                          .site = Site::current()});
  std::exception_ptr failure;
  for (const auto& work : backend_of(options.group.resolved()).submit_messages(std::move(operations))) try {
      Work(work).wait();
    } catch (const std::exception&) {
      failure = std::current_exception();  // the memory of the others is in use until they end
    }
  if (failure) std::rethrow_exception(failure);
}

void pass_bytes(const at::Tensor& bytes, int from, int to, const CollectiveOptions& options) {
  const bool is_sent = options.group.resolved().rank() == from;
  in_pieces(bytes, [&](const at::Tensor& piece) { pass_together({{piece, is_sent ? to : from, is_sent}}, options); });
}

}  // namespace muster::comm
