// Which of a host's addresses other hosts use to reach it.

#include "store/address/host_address.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace muster::test {
namespace {

using store::address_for_peers;
using Addresses = std::vector<std::string>;

TEST(HostAddress, TowardsALoopbackIsALoopback) {
  EXPECT_EQ(store::address_towards("127.0.0.1"), "127.0.0.1");
  EXPECT_EQ(store::address_towards("localhost").empty(), false);
  EXPECT_EQ(store::address_towards("no such host"), "");
  EXPECT_EQ(store::address_towards_store("unix:@name"), "127.0.0.1");
  EXPECT_EQ(store::address_towards_store("tls://127.0.0.1:29400"), "127.0.0.1");
  EXPECT_EQ(store::address_towards_store("nonsense"), "");
}

// Debian gives a host's own name the address 127.0.1.1. Ranks on other hosts cannot reach that.
TEST(HostAddress, RanksOfOtherHostsAreNotGivenALoopback) {
  EXPECT_EQ(address_for_peers({"127.0.1.1"}, {"10.0.0.5", "10.0.1.5"}, true), "10.0.0.5");
  EXPECT_EQ(address_for_peers({"127.0.1.1", "10.0.1.5"}, {"10.0.0.5", "10.0.1.5"}, true), "10.0.1.5");
  EXPECT_EQ(address_for_peers({"", "::1"}, {"10.0.0.5"}, true), "10.0.0.5");
  EXPECT_EQ(address_for_peers({"10.0.1.5"}, {"10.0.0.5", "10.0.1.5"}, true), "10.0.1.5");
  EXPECT_EQ(address_for_peers({}, {"127.0.0.1"}, true), "127.0.0.1") << "it has no other";
}

TEST(HostAddress, RanksOfOneHostMayMeetAtItsLoopback) {
  EXPECT_EQ(address_for_peers({}, {"10.0.0.5"}, false), "127.0.0.1");
  EXPECT_EQ(address_for_peers({"", "127.0.1.1"}, {"10.0.0.5"}, false), "127.0.1.1");
}

// What the kernel reports about this machine.
TEST(HostAddress, OwnAddressesCanBeReached) {
  const Addresses own = store::own_addresses();
  ASSERT_FALSE(own.empty());
  for (const auto& address : own) EXPECT_EQ(store::address_towards(address), address);
  if (own.size() > 1) {
    EXPECT_FALSE(store::is_loopback(own.front()));
  }
}

}  // namespace
}  // namespace muster::test
