// What the tests of the ucx transport without UCX have in common.
#pragma once

#include <gmock/gmock.h>

#include <memory>

#include "contract/transport_contract.h"
#include "support/fake_fabric.h"
#include "transport/ucx/packet.h"
#include "transport/ucx/ucx_transport.h"

namespace muster::test::ucx_peers {

using std::chrono::milliseconds;
using testing::HasSubstr;
using transport::UcxOptions;
using UcxEntry = transport::ucx::Entry;

inline UcxOptions options_of(size_t rank, size_t size, const std::shared_ptr<Hub>& hub) {
  UcxOptions options;
  options.rank = static_cast<int>(rank);
  options.size = static_cast<int>(size);
  options.prefix = "test/";
  options.heartbeat = std::chrono::seconds(60);
  options.fabric = [hub](transport::ucx::FabricEvents& events) { return std::make_unique<FakeFabric>(*hub, events); };
  return options;
}

}  // namespace muster::test::ucx_peers
