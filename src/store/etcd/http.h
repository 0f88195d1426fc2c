// HTTP requests with libcurl. It is loaded when the first request is made, so a process without requests does not load
// it and the twenty libraries that it needs. Debian's package is libcurl4.
//
// Connections are kept for the next request. No proxies, no redirections, no signals; sockets are close-on-exec and
// notice a dead host like those of tcp_address.h.
//
// Thread-safety: all methods; requests of several threads run concurrently.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "muster/base/deadline.h"
#include "store/kit/idle.h"

namespace muster::store {

class Http {
 public:
  struct Answer {
    enum class End {
      kWhole,    // the whole answer has come
      kStopped,  // by `on_bytes`
      kLate,     // the deadline passed
      kRefused,  // there was no connection, so the request was not sent
      kBroken    // the connection ended, or the answer was not HTTP; the request may have taken effect
    };
    End end = End::kWhole;
    long status = 0;     // HTTP's
    std::string body;    // without on_bytes
    std::string reason;  // of kRefused and kBroken
    // Whether the request may have arrived twice: libcurl sends it again if a kept connection ends without an answer.
    bool perhaps_twice = false;
  };

  // Unavailable if libcurl is not installed.
  Http();
  ~Http();
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

  // Sends JSON. If `on_bytes` is given, it gets each piece of the answer as it arrives, until it returns false.
  Answer post(const std::string& url, std::string_view body, Deadline deadline,
              const std::function<bool(std::string_view)>& on_bytes = {});

 private:
  class Handle;
  Idle<Handle> idle_;
};

}  // namespace muster::store
