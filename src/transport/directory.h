// Where workers leave and find each other's addresses: the job's store. This layer knows nothing else about the store.
//
// Thread-safety: that of the two functions.
#pragma once

#include <functional>
#include <string>

#include "muster/base/deadline.h"

namespace muster::transport {

struct Directory {
  std::function<void(const std::string& key, const std::string& value)> post;
  std::function<std::string(const std::string& key, Deadline deadline)> read;  // waits for it; TimeoutError
};

}  // namespace muster::transport
