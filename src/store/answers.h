// What a server answered lately to requests that change something, so that one which comes again, because the
// connection was cut before its answer arrived, has the answer of the first time and is not done twice.
//
// Bounded: by number and bytes the oldest go first. A client gives up a cut connection within seconds, in which that
// many are not made; and one request of a client is under way on each of its connections.
//
// Thread-safety: belongs to one thread, the server's.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "store/protocol.h"

namespace muster::store {

class Answers {
 public:
  static constexpr size_t kMost = 4096, kMostBytes = 16u << 20;

  Answers();

  uint64_t server() const { return server_; }  // fresh for each server, never 0

  // Why a request is not for this server; nullopt where it is.
  std::optional<Reply> refusal(const Request& request) const;
  std::optional<Reply> recall(const Request& request) const;
  void keep(const Request& request, const Reply& reply);

 private:
  using Call = std::pair<uint64_t, uint64_t>;  // client, call

  const uint64_t server_;
  std::map<Call, Reply> replies_;
  std::deque<Call> oldest_;
  size_t bytes_ = 0;
};

}  // namespace muster::store
