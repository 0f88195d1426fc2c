// The addresses at which other hosts reach this host.
//
// Thread-safety: pure functions. They read the host's interfaces and routes, and send nothing; a name is looked up by
// getaddrinfo(3), which has no deadline.
#pragma once

#include <string>
#include <vector>

namespace muster::store {

// This host's name, "localhost" if it has none.
std::string host_name();

// The address from which this host reaches `host`, because the answer comes back the same way. Empty if there is no
// route, or if the name stands for this host's loopback, at which no other host can reach it: Debian gives a host's own
// name the address 127.0.1.1. "localhost" and "127.…" are returned unchanged.
std::string address_towards(const std::string& host, const std::string& port = "9");
// The same for the host in the address of a store, "tls://head:29400"; 127.0.0.1 for a store of this host, "unix:…".
std::string address_towards_store(const std::string& store_address);
// The same, but the host's name instead of an empty text.
std::string own_address(const std::string& store_address);

// Whether the host of a store's address is this one.
bool is_own(const std::string& store_address);

// The addresses of this host's interfaces that are up: those of real interfaces first, then those of bridges of
// containers; the loopback's only if there is no other.
std::vector<std::string> own_addresses();

bool is_loopback(const std::string& address);  // "127.…" or "::1"

// The address at which a rank listens for the ranks of its group. `towards`: what address_towards() says of places that
// all ranks know, the best first, some perhaps empty. `own`: own_addresses(). If the group's ranks may be on other
// hosts, it is never a loopback address, unless this host has no other.
std::string address_for_peers(const std::vector<std::string>& towards, const std::vector<std::string>& own,
                              bool may_be_far);

}  // namespace muster::store
