// The latest answers of a server to requests that change something. A client sends a request again if the connection
// was cut before the answer arrived; then the server sends the first answer again and does not execute the request
// twice.
//
// Number and bytes are bounded; the oldest answers are dropped first. A client gives up a cut connection within
// seconds, in which even a job of a thousand ranks makes fewer requests that change something, and each of its
// connections carries one request at a time.
//
// Thread-safety: belongs to the server's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "store/served/protocol.h"

namespace muster::store {

class Answers {
 public:
  static constexpr size_t kMost = 64 << 10, kMostBytes = 32u << 20;

  Answers();

  uint64_t server() const { return server_; }  // fresh for each server, never 0

  // Why a request is not for this server; nullopt if it is.
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
