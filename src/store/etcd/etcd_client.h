// etcd's v3 interface as JSON over HTTP (its grpc-gateway), as much of it as a store needs.
//
// A request goes to one endpoint, and to the next one if that endpoint has gone, is too slow or has no leader, until
// the deadline. So a request may take effect more than once, or may have taken effect although it seems to have failed.
// If surely_once is true, neither has happened.
//
// https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and …/learning/api/ describe the messages.
//
// Errors: Unavailable if no endpoint answers in time, or if etcd refuses (the message quotes it); InvalidArgument if a
// request is too large for etcd; CorruptError if an answer is not etcd's. Thread-safety: all methods.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"
#include "store/address/tcp_address.h"
#include "store/etcd/http.h"

namespace muster::store {

class EtcdClient {
 public:
  explicit EtcdClient(std::vector<TcpAddress> endpoints);

  struct Entry {
    std::string value;
    int64_t revision = 0;  // the store's, when the key last changed
  };
  struct Looked {
    std::optional<Entry> entry;
    int64_t revision = 0;  // the store's at the time of the read; later changes have greater ones
  };
  struct Swapped {
    bool stored = false;
    bool surely_once = true;  // false: if it was not stored, an earlier attempt may have stored it
    Looked now;               // if not stored
  };
  struct Event {
    std::optional<std::string> value;  // nullopt: erased
    int64_t revision = 0;
  };
  struct Watched {
    enum class End { kEvent, kLate, kCompacted } end = End::kLate;
    Event event;               // the first one
    int64_t compacted_to = 0;  // etcd has forgotten the changes before
  };

  Looked look(std::string_view key, Deadline deadline);
  void put(std::string_view key, std::string_view value, Deadline deadline);
  // Stores `value` if the key's revision is `revision` (0: it is not there).
  Swapped swap(std::string_view key, int64_t revision, std::string_view value, Deadline deadline);
  bool erase(std::string_view key, Deadline deadline);
  void erase_all(std::string_view prefix, Deadline deadline);  // all keys that begin with `prefix`
  int64_t count(std::string_view prefix, Deadline deadline);
  // Waits for the first change of the key from revision `from` on, which may be in the past. Late after `deadline`, and
  // also after a while, so that the caller reads the key: an endpoint that is cut off from the others sees no change.
  Watched watch(std::string_view key, int64_t from, Deadline deadline);

  std::string names() const;                   // "host:port,host:port"
  bool was_silent() const { return silent_; }  // the last call got no answer

 private:
  struct Called {
    std::string body;
    bool surely_once = true;
  };
  Called call(const char* path, const std::string& body, Deadline deadline);
  std::string url(size_t endpoint, const char* path) const;
  void leave(size_t endpoint);  // uses the next one, unless another thread already does

  const std::vector<TcpAddress> endpoints_;
  std::atomic<size_t> current_{0};
  std::atomic<bool> silent_{false};
  Http http_;
};

}  // namespace muster::store
