#include "store/served/session.h"

namespace muster::store {
namespace {

Reply with_number(int64_t number) {
  Reply reply;
  reply.number = number;
  return reply;
}

// A value that was set through local() may be larger than a message.
Reply checked(Reply reply) {
  static constexpr size_t kRoom = 1024;  // for the other fields of a reply
  if (!reply.value || reply.value->size() <= kMaxBody - kRoom) return reply;
  return error_reply(
      Unavailable(text("a value of ", reply.value->size(), " bytes is too long to leave the store's server"),
                  "Keep values below 64 MiB; data does not belong in the store"));
}

Reply do_answer(SharedTable& table, const Request& request) {
  Reply reply;
  switch (request.op) {
    case Op::kSet:
      table.set(request.keys[0], request.value);
      return reply;
    case Op::kTryGet:
      reply.value = table.try_get(request.keys[0]);
      return reply;
    case Op::kAdd:
      return with_number(table.add(request.keys[0], request.number));
    case Op::kCompareSet: {
      auto exchanged = table.compare_set(request.keys[0], request.expected, request.value);
      reply.number = exchanged.stored;
      reply.value = std::move(exchanged.value);
      return reply;
    }
    case Op::kErase:
      return with_number(table.erase(request.keys[0]));
    case Op::kNumKeys:
      return with_number(table.num_keys());
    case Op::kGet:
    case Op::kWait:
    case Op::kWatch:
      break;  // these wait: finish() answers them
  }
  return reply;
}

bool waits(Op op) { return op == Op::kGet || op == Op::kWait || op == Op::kWatch; }

}  // namespace

std::optional<Reply> answer(SharedTable& table, Answers* answers, const Request& request) {
  if (answers) {
    if (auto known = answers->refusal(request)) return known;
    if (auto known = answers->recall(request)) return known;
  }
  if (!waits(request.op)) {
    Reply reply;
    try {
      reply = checked(do_answer(table, request));
    } catch (const Error& error) {
      reply = error_reply(error);
    }
    if (answers) answers->keep(request, reply);
    return reply;
  }
  const Want want = want_of(request);
  if (auto found = table.find(want, nullptr)) return reply_to(request, *std::move(found));
  if (request.wait_ms == 0) return error_reply(table.timed_out(want));
  return std::nullopt;
}

Want want_of(const Request& request) {
  Want want{request.keys, std::nullopt};
  if (request.op == Op::kWatch) want.above = static_cast<uint64_t>(request.number);
  return want;
}

Reply reply_to(const Request& request, SharedTable::Versioned found) {
  Reply reply;
  if (request.op == Op::kWait) return reply;
  reply.value = std::move(found.value);
  reply.number = static_cast<int64_t>(found.version);
  return checked(std::move(reply));
}

}  // namespace muster::store
