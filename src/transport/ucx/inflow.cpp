#include "transport/ucx/inflow.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "transport/piece.h"

namespace muster::transport::ucx {
namespace {

constexpr size_t kFetches = 4;            // under way at a time
constexpr uint64_t kMostAhead = 1 << 20;  // numbers beyond the next; a sender's window is far smaller

}  // namespace

Inflow::Incoming& Inflow::incoming(const Header& header) {
  if (header.number < next_ || header.number - next_ > kMostAhead)
    throw CorruptError(text("a packet of message ", header.number, " where ", next_, " is the next"));
  return messages_[header.number];
}

void Inflow::on_arrival(const Header& header, std::span<const std::byte> data) {
  if (closed_) return;
  Incoming& message = incoming(header);
  if (header.kind == Kind::kPiece && !message.framed) {
    if (message.early.size() >= limits_.pieces || data.size() > kOffered)
      throw CorruptError("too many pieces of a message");
    message.early.push_back({header, copy_of(data)});
    return;
  }
  if (header.kind == Kind::kGoodbye && (!data.empty() || header.count || header.body || header.total || header.size))
    throw CorruptError("a goodbye with contents");
  put(message, header, data);
}

void Inflow::on_offer(const Header& header, size_t bytes, Offer* offer) {
  // The offer is held from here on, so that close() refuses it whatever happens below.
  Wanted& wanted = wanted_.emplace_back(Wanted{header, bytes, offer});
  if (closed_) return;
  Incoming& message = incoming(header);
  if (header.kind == Kind::kGoodbye) throw CorruptError("a goodbye that is offered");
  if (header.kind == Kind::kPiece && !message.framed) {
    // The bound is above what a message within the limits can have.
    if (message.offers.size() >= limits_.pieces + limits_.bytes / kChunk)
      throw CorruptError("too many pieces of a message");
    message.offers.push_back(wanted);
    wanted_.pop_back();
    return;
  }
  claim(message, header, bytes);
}

// Registers a chunk that is coming, and checks that it comes once and has the right length.
Inflow::Block& Inflow::claim(Incoming& message, const Header& header, size_t bytes) {
  Block* block = &message.frame;
  if (header.kind == Kind::kPiece) {
    if (header.count >= message.large.size() || header.size <= kSmall ||
        message.message.pieces[header.count].bytes != header.size)
      throw CorruptError("a piece that its message does not have");
    block = &message.large[header.count];
  } else if (block->has.empty()) {
    if (header.size > most_bytes(header, limits_)) throw CorruptError("a frame of another length than its header says");
    message.header = header;
    message.message.goodbye = header.kind == Kind::kGoodbye;
  } else if (header.kind != message.header.kind || header.size != message.header.size ||
             header.count != message.header.count || header.body != message.header.body ||
             header.total != message.header.total) {
    throw CorruptError("a frame whose chunks do not belong together");
  }
  if (header.offset % kChunk != 0 || header.offset > header.size ||
      bytes != std::min<uint64_t>(kChunk, header.size - header.offset))
    throw CorruptError("a chunk of another length than its header says");
  if (block->has.empty()) {
    block->missing = std::max<size_t>(1, (header.size + kChunk - 1) / kChunk);
    block->has.resize(block->missing);
    block->data = make_piece(header.size);
  }
  const size_t index = header.offset / kChunk;
  if (index >= block->has.size()) throw CorruptError("a chunk behind the end");
  if (block->has[index])
    throw CorruptError(header.kind == Kind::kPiece ? "a piece that came twice" : "a message that came twice");
  block->has[index] = true;
  return *block;
}

// Stores a chunk that has come.
void Inflow::put(Incoming& message, const Header& header, std::span<const std::byte> data) {
  Block& block = claim(message, header, data.size());
  copy_bytes(block.data.data + header.offset, data.data(), data.size());
  came(message, header, block);
}

void Inflow::came(Incoming& message, const Header& header, Block& block) {
  if (--block.missing > 0) return;
  if (header.kind != Kind::kPiece) return open(message);
  message.message.pieces[header.count] = std::move(block.data);
  --message.missing;
}

// To be called when the frame is complete.
void Inflow::open(Incoming& message) {
  Unpacked frame = unpack(message.header, message.frame.data, limits_);
  message.framed = true;
  message.message.number = message.header.number;
  message.message.cost = cost_of(message.header.total, message.header.count);
  message.message.body = frame.body;
  message.message.pieces = std::move(frame.pieces);
  message.message.block = std::move(message.frame.data);
  message.missing = frame.missing;
  message.large.resize(frame.missing > 0 ? message.header.count : 0);
  for (const Arrived& arrived : std::exchange(message.early, {}))
    put(message, arrived.header, {arrived.data.data, arrived.data.bytes});
  const std::vector<Wanted> offers = std::exchange(message.offers, {});
  wanted_.insert(wanted_.end(), offers.begin(), offers.end());
  for (const Wanted& wanted : offers) claim(message, wanted.header, wanted.bytes);
}

void Inflow::fetch(Fabric& fabric) {
  if (closed_) return close(fabric);
  while (failure_.empty() && !wanted_.empty() && fetching_.size() < kFetches) {
    Fetch& fetch = fetching_.emplace_back();
    fetch.self = std::prev(fetching_.end());
    fetch.flow = this;
    const Wanted wanted = wanted_.front();
    wanted_.pop_front();
    fetch.header = wanted.header;
    Incoming& message = messages_.at(wanted.header.number);  // has claimed the chunk
    const Block& block = wanted.header.kind == Kind::kPiece ? message.large[wanted.header.count] : message.frame;
    fetch.into = {block.data.data + wanted.header.offset, wanted.bytes, block.data.owner};  // held until it is over
    State state = State::kUnderWay;
    const char* const error = fabric.fetch(wanted.offer, {fetch.into.data, fetch.into.bytes}, fetch, state);
    if (error || state == State::kDone) fetched(fetch.self, error);
  }
}

void Inflow::fetched(std::list<Fetch>::iterator fetch, const char* error) {
  const Header header = fetch->header;
  fetching_.erase(fetch);
  if (closed_ || !failure_.empty()) return;
  if (error) {
    failure_ = text("its data did not come: ", error);
    return;
  }
  try {
    Incoming& message = messages_.at(header.number);
    came(message, header, header.kind == Kind::kPiece ? message.large[header.count] : message.frame);
  } catch (const Error& problem) {
    failure_ = text("it broke the protocol: ", problem.message());
  } catch (const std::bad_alloc&) {
    failure_ = "it sent a message for which this worker has not enough memory";
  }
}

std::optional<Inflow::Taken> Inflow::take() {
  const auto first = messages_.find(next_);
  if (first == messages_.end() || !first->second.framed || first->second.missing > 0) return {};
  Taken taken = std::move(first->second.message);
  messages_.erase(first);
  ++next_;
  return taken;
}

void Inflow::close(Fabric& fabric) {
  closed_ = true;
  for (const Wanted& wanted : wanted_) fabric.refuse(wanted.offer);
  wanted_.clear();
  for (auto& [number, message] : messages_)
    for (const Wanted& wanted : message.offers) fabric.refuse(wanted.offer);
  messages_.clear();
}

}  // namespace muster::transport::ucx
