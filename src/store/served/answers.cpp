#include "store/served/answers.h"

#include <span>

#include "base/random.h"

namespace muster::store {
namespace {

uint64_t fresh() {
  uint64_t number = 0;
  while (number == 0) random_bytes(std::span(reinterpret_cast<unsigned char*>(&number), sizeof number));
  return number;
}

size_t size_of(const Reply& reply) {
  return sizeof reply + reply.message.size() + reply.advice.size() + (reply.value ? reply.value->size() : 0);
}

bool changes(const Request& request) {
  return request.client != 0 && (request.op == Op::kSet || request.op == Op::kAdd || request.op == Op::kCompareSet ||
                                 request.op == Op::kErase);
}

}  // namespace

Answers::Answers() : server_(fresh()) {}

std::optional<Reply> Answers::refusal(const Request& request) const {
  if (request.server == 0 || request.server == server_) return std::nullopt;
  return error_reply(Unavailable("the store went away, and another serves at its address",
                                 "The launcher (muster run) that served it has ended; its last lines may say why"));
}

std::optional<Reply> Answers::recall(const Request& request) const {
  if (!changes(request)) return std::nullopt;
  const auto found = replies_.find({request.client, request.call});
  return found == replies_.end() ? std::nullopt : std::optional(found->second);
}

void Answers::keep(const Request& request, const Reply& reply) {
  if (!changes(request)) return;
  const auto [place, is_new] = replies_.emplace(Call{request.client, request.call}, reply);
  if (!is_new) return;
  oldest_.push_back(place->first);
  for (bytes_ += size_of(reply); oldest_.size() > kMost || bytes_ > kMostBytes; oldest_.pop_front()) {
    const auto first = replies_.find(oldest_.front());
    bytes_ -= size_of(first->second);
    replies_.erase(first);
  }
}

}  // namespace muster::store
