// HTTP requests by libcurl, which is loaded when the first one is made: it and the twenty libraries that it brings cost
// nothing to who needs none. Debian's package is libcurl4.
//
// Connections are kept for the next request. No proxies, no redirections, no signals; sockets are close-on-exec and
// notice a dead host like those of tcp_address.h.
//
// Thread-safety: all of it; requests of several threads run at once.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "muster/base/deadline.h"
#include "store/idle.h"

namespace muster::store {

class Http {
 public:
  struct Answer {
    enum class End {
      kWhole,    // all of it is here
      kStopped,  // by `on_bytes`
      kLate,     // the deadline passed
      kRefused,  // there was no connection, so the request was not sent
      kBroken    // the connection ended, or what came was no HTTP; the request may have had its effect
    };
    End end = End::kWhole;
    long status = 0;     // HTTP's
    std::string body;    // without on_bytes
    std::string reason;  // of kRefused and kBroken
    // Whether the request may have arrived twice: libcurl sends it again where a kept connection ends without a word.
    bool perhaps_twice = false;
  };

  // Unavailable where there is no libcurl.
  Http();
  ~Http();
  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

  // Sends JSON. With `on_bytes` each piece of the answer goes there as it comes, until it returns false.
  Answer post(const std::string& url, std::string_view body, Deadline deadline,
              const std::function<bool(std::string_view)>& on_bytes = {});

 private:
  class Handle;
  Idle<Handle> idle_;
};

}  // namespace muster::store
