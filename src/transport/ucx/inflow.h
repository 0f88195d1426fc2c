// What comes from one peer: packets arrive in any order and are put together into messages, which are taken in the
// order of their numbers.
//
// Offered data is fetched when the message that it belongs to is known and within the limits; memory is allocated then,
// not before. Only a few fetches are under way at a time. A packet that comes before the frame of its message waits.
//
// Errors: CorruptError if a packet breaks the rules; after that only close() may be called.
// Thread-safety: none; the transport's lock is held. It must outlive the fabric, which writes into its fetches.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "transport/ucx/fabric.h"
#include "transport/ucx/packet.h"

namespace muster::transport::ucx {

class Inflow {
 public:
  explicit Inflow(const Limits& limits) : limits_(limits) {}
  Inflow(const Inflow&) = delete;
  Inflow& operator=(const Inflow&) = delete;

  // A frame, a piece or a goodbye has come: with its data, or with an offer of `bytes`.
  void on_arrival(const Header& header, std::span<const std::byte> data);
  void on_offer(const Header& header, size_t bytes, Offer* offer);

  // Begins what can be fetched now.
  void fetch(Fabric& fabric);
  bool is_fetching() const { return !fetching_.empty(); }
  // Why a fetch failed; empty if none did.
  const std::string& failure() const { return failure_; }

  struct Taken {
    uint64_t number = 0, cost = 0;
    bool goodbye = false;
    Piece block;  // holds the body
    std::string_view body;
    std::vector<Piece> pieces;
  };
  // The next message, if it is complete.
  std::optional<Taken> take();

  // Refuses what is offered. Nothing is taken any more; fetches under way still end.
  void close(Fabric& fabric);

 private:
  struct Wanted {
    Header header;
    size_t bytes = 0;
    Offer* offer = nullptr;
  };
  struct Arrived {
    Header header;
    Piece data;
  };
  // A frame, or a large piece, whose chunks are coming.
  struct Block {
    Piece data;
    std::vector<bool> has;  // which chunks have come or are being fetched; empty: none has
    size_t missing = 0;     // chunks
  };
  struct Incoming {
    bool framed = false;  // the frame is there
    Header header;        // of the frame
    Block frame;
    Taken message;
    size_t missing = 0;          // of its pieces
    std::vector<Block> large;    // by piece
    std::vector<Arrived> early;  // chunks of pieces that came before the frame,
    std::vector<Wanted> offers;  // and that were offered before it
  };
  struct Fetch final : Transfer {
    Inflow* flow = nullptr;
    std::list<Fetch>::iterator self;
    Header header;
    Piece into;
    void on_done(const char* error) override { flow->fetched(self, error); }
  };

  Incoming& incoming(const Header& header);
  Block& claim(Incoming& message, const Header& header, size_t bytes);
  void put(Incoming& message, const Header& header, std::span<const std::byte> data);
  void came(Incoming& message, const Header& header, Block& block);
  void open(Incoming& message);
  void fetched(std::list<Fetch>::iterator fetch, const char* error);

  const Limits limits_;
  uint64_t next_ = 1;
  std::map<uint64_t, Incoming> messages_;
  std::deque<Wanted> wanted_;
  std::list<Fetch> fetching_;
  std::string failure_;
  bool closed_ = false;
};

}  // namespace muster::transport::ucx
