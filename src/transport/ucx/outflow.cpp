#include "transport/ucx/outflow.h"

#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::transport::ucx {
namespace {

constexpr size_t kSpare = 16;  // packets that are kept for the next ones

}  // namespace

void Outflow::push(Message message, Frame frame) {
  if (closed_) {
    spent_.first.push_back(std::move(message));
    return;
  }
  backlog_.fetch_add(frame.total, std::memory_order_acq_rel);
  const uint64_t cost = cost_of(frame.total, frame.count);
  queue_.push_back({std::move(message), std::move(frame), cost});
}

void Outflow::push_goodbye() {
  if (!closed_) queue_.push_back({{}, {}, cost_of(0, 0), true});
}

void Outflow::push_note(Kind kind) {
  const auto same = [kind](Kind other) { return other == kind; };
  if (std::none_of(notes_.begin(), notes_.end(), same)) notes_.push_back(kind);
}

Outflow::Packet& Outflow::packet(Kind kind, uint64_t number) {
  if (spare_.empty()) {
    under_way_.emplace_back();
  } else {
    under_way_.splice(under_way_.end(), spare_, spare_.begin());
  }
  Packet& packet = under_way_.back();
  packet.self = std::prev(under_way_.end());
  packet.flow = this;
  packet.header = Header{};
  packet.header.kind = kind;
  packet.header.from = static_cast<uint32_t>(self_);
  packet.header.key = key_;
  packet.header.number = number;
  packet.bytes = 0;
  return packet;
}

const char* Outflow::post(Fabric& fabric, Packet& packet, uint64_t taken) {
  packet.header.taken = taken;
  ++posted_;
  std::span<const std::byte> data = std::as_bytes(std::span(packet.data));
  if (packet.piece.bytes > 0) data = {packet.piece.data, packet.piece.bytes};
  State state = State::kUnderWay;
  const char* const error = fabric.send(peer_, packet.header.bytes(), data, data.size() > kOffered, packet, state);
  if (error || state == State::kDone) sent(packet.self);
  return error;
}

void Outflow::sent(std::list<Packet>::iterator packet) {
  if (!closed_) backlog_.fetch_sub(packet->bytes, std::memory_order_acq_rel);
  if (packet->piece.owner) spent_.second.push_back(std::move(packet->piece));
  packet->piece = {};
  packet->data = {};
  if (spare_.size() < kSpare) {
    spare_.splice(spare_.end(), under_way_, packet);
  } else {
    under_way_.erase(packet);
  }
}

// Sends a frame or a piece in chunks. `overhead`: bytes of it that are not counted in the backlog.
const char* Outflow::post_chunks(Fabric& fabric, const Header& header, Piece data, size_t overhead, uint64_t taken) {
  const char* error = nullptr;
  for (size_t at = 0; at < data.bytes && !error; at += kChunk) {
    Packet& chunk = packet(header.kind, header.number);
    chunk.header.count = header.count;
    chunk.header.body = header.body;
    chunk.header.total = header.total;
    chunk.header.size = data.bytes;
    chunk.header.offset = at;
    chunk.piece = {data.data + at, std::min(kChunk, data.bytes - at), data.owner};
    const size_t aside = std::min(overhead, chunk.piece.bytes);
    overhead -= aside;
    chunk.bytes = chunk.piece.bytes - aside;
    error = post(fabric, chunk, taken);
  }
  return error;
}

const char* Outflow::post_message(Fabric& fabric, Queued next, uint64_t taken) {
  const uint64_t number = ++last_;
  unacknowledged_.emplace_back(number, next.cost);
  unacknowledged_cost_ += next.cost;
  if (next.goodbye) return post(fabric, packet(Kind::kGoodbye, number), taken);
  Frame& frame = next.frame;
  size_t bytes = frame.total;  // those of the message that are in the frame
  for (const uint32_t i : frame.large) bytes -= next.message.pieces[i].bytes;
  Header header;
  header.kind = Kind::kFrame;
  header.number = number;
  header.count = frame.count;
  header.body = frame.body;
  header.total = frame.total;
  const char* error = nullptr;
  if (frame.data.size() <= kChunk) {
    Packet& only = packet(Kind::kFrame, number);
    only.header.count = header.count;
    only.header.body = header.body;
    only.header.total = header.total;
    only.header.size = frame.data.size();
    only.bytes = bytes;
    only.data = std::move(frame.data);
    error = post(fabric, only, taken);
  } else {
    const auto held = std::make_shared<std::string>(std::move(frame.data));
    error = post_chunks(fabric, header, {reinterpret_cast<std::byte*>(held->data()), held->size(), held},
                        held->size() - bytes, taken);
  }
  header = {};
  header.kind = Kind::kPiece;
  header.number = number;
  for (const uint32_t i : frame.large) {
    if (error) break;
    header.count = i;
    error = post_chunks(fabric, header, std::move(next.message.pieces[i]), 0, taken);
  }
  if (!next.message.pieces.empty()) spent_.first.push_back(std::move(next.message));
  return error;
}

const char* Outflow::pump(Fabric& fabric, uint64_t taken) {
  const char* error = nullptr;
  while (!error && !notes_.empty()) {
    const Kind kind = notes_.front();
    notes_.pop_front();
    error = post(fabric, packet(kind, 0), taken);
  }
  while (!error && !queue_.empty() &&
         (unacknowledged_.size() < 2 || unacknowledged_cost_ < kAcknowledged ||
          unacknowledged_cost_ + queue_.front().cost <= kWindow)) {
    Queued next = std::move(queue_.front());
    queue_.pop_front();
    error = post_message(fabric, std::move(next), taken);
  }
  return error;
}

void Outflow::on_taken(uint64_t number) {
  if (number > last_) throw CorruptError(text("it has taken message ", number, " of ", last_));
  while (!unacknowledged_.empty() && unacknowledged_.front().first <= number) {
    unacknowledged_cost_ -= unacknowledged_.front().second;
    unacknowledged_.pop_front();
  }
}

void Outflow::close() {
  closed_ = true;
  for (Queued& queued : queue_) spent_.first.push_back(std::move(queued.message));
  queue_.clear();
  unacknowledged_.clear();
  unacknowledged_cost_ = 0;
  backlog_.store(0, std::memory_order_release);
}

}  // namespace muster::transport::ucx
