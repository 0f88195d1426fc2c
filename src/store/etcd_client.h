// etcd's v3 interface as JSON over HTTP (its grpc-gateway), as much of it as a store needs.
//
// A request goes to one endpoint, and to the next where that one is gone, too slow or has no leader, until its
// deadline. So it may have its effect more than once, or have had it although it seems to have failed:
// Sent::surely_once says.
//
// https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/ and …/learning/api/ describe the messages.
//
// Errors: Unavailable where no endpoint answers in time, or etcd refuses (its words are in the message);
// InvalidArgument where a request is too large for it; Corrupt where an answer is none of etcd's. Thread-safety: all of
// it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "muster/base/deadline.h"
#include "store/http.h"
#include "store/tcp_address.h"

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
    int64_t revision = 0;  // the store's, when it was looked at: what comes later is above
  };
  struct Swapped {
    bool stored = false;
    bool surely_once = true;  // false: where not stored, an earlier sending may have been
    Looked now;               // where not stored
  };
  struct Event {
    std::optional<std::string> value;  // nullopt: erased
    int64_t revision = 0;
  };
  struct Watched {
    enum class End { kEvent, kLate, kCompacted } end = End::kLate;
    Event event;               // the first one
    int64_t compacted_to = 0;  // etcd has forgotten what was before
  };

  Looked look(std::string_view key, Deadline deadline);
  void put(std::string_view key, std::string_view value, Deadline deadline);
  // Stores `value` if the key's revision is `revision` (0: it is not there).
  Swapped swap(std::string_view key, int64_t revision, std::string_view value, Deadline deadline);
  bool erase(std::string_view key, Deadline deadline);
  void erase_all(std::string_view prefix, Deadline deadline);  // what begins so
  int64_t count(std::string_view prefix, Deadline deadline);
  // Waits for the first change of the key from revision `from` on, past or to come. Late after `deadline`, and also
  // after a while, so that the caller looks again: an endpoint that is cut off from the others hears of nothing.
  Watched watch(std::string_view key, int64_t from, Deadline deadline);

  std::string names() const;                   // "host:port,host:port"
  bool was_silent() const { return silent_; }  // the last time that it was called

 private:
  struct Called {
    std::string body;
    bool surely_once = true;
  };
  Called call(const char* path, const std::string& body, Deadline deadline);
  std::string url(size_t endpoint, const char* path) const;
  void leave(size_t endpoint);  // for the next one, unless another thread has

  const std::vector<TcpAddress> endpoints_;
  std::atomic<size_t> current_{0};
  std::atomic<bool> silent_{false};
  Http http_;
};

}  // namespace muster::store
