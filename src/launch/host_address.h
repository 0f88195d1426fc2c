// The address of this host that another one can reach.
//
// Thread-safety: pure functions.
#pragma once

#include <string>

namespace muster::launch {

// The address by which this host reaches the store at `store_address` ("tls://head:29400"), since the answer comes back
// the same way; 127.0.0.1 for stores of this host ("unix:…"), the host's name where there is no route, or
// where that host is this one and calls itself by its loopback (Debian's 127.0.1.1). Sends nothing.
std::string own_address(const std::string& store_address);

// Whether the host of a store's address is this one.
bool is_own(const std::string& store_address);

}  // namespace muster::launch
