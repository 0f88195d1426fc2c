// Ways: which transport is used for which worker.
//
// Thread-safety: values and functions.
#pragma once

#include <string>

namespace muster::rpc {

struct Ways {
  bool shm = true;          // to workers of the same host
  std::string far = "tcp";  // to the others: tcp, ucx; empty: there must be no others

  std::string text() const;  // as parse() takes it; the same for the same ways
  // Parses Options::transport: auto, shm, tcp, ucx, "shm,tcp" or "shm,ucx". auto means the value of
  // MUSTER_RPC_TRANSPORT, if it is set. InvalidArgument for anything else.
  static Ways parse(const std::string& transport);
};

}  // namespace muster::rpc
