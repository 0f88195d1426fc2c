// What the tests of the TCP transport have in common.
#pragma once

#include <gmock/gmock.h>

#include <optional>

#include "contract/transport_contract.h"
#include "muster/store/store.h"
#include "transport/tcp/connector.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/hello.h"
#include "transport/tcp/tcp_transport.h"

namespace muster::test::tcp_meshes {

using std::chrono::milliseconds;
using testing::HasSubstr;
using transport::Entry;
using transport::Hello;
using transport::Piece;
using transport::TcpOptions;
using transport::Transport;

inline TcpOptions options_of(size_t rank, size_t size, const std::optional<Secret>& secret) {
  TcpOptions options;
  options.rank = static_cast<int>(rank);
  options.size = static_cast<int>(size);
  options.secret = secret;
  options.prefix = "test/";
  options.heartbeat = std::chrono::seconds(60);  // receivers of the contract block, and sanitizers are slow
  return options;
}

}  // namespace muster::test::tcp_meshes
