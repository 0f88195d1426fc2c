#include "rpc/kit/ways.h"

#include "base/env.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::rpc {
namespace {

constexpr const char* kVariable = "MUSTER_RPC_TRANSPORT";

}  // namespace

std::string Ways::text() const { return far.empty() ? "shm" : shm ? "shm," + far : far; }

Ways Ways::parse(const std::string& transport) {
  const auto set = transport == "auto" ? env_string(kVariable) : std::nullopt;
  const std::string name = set.value_or(transport);
  if (name == "auto" || name == "shm,tcp") return {};
  if (name == "shm") return {.shm = true, .far = ""};
  if (name == "shm,ucx") return {.shm = true, .far = "ucx"};
  if (name == "tcp" || name == "ucx") return {.shm = false, .far = name};
  throw InvalidArgument(
      muster::text(set ? kVariable : "transport", ": expected the name of a transport, got \"", name, '"'),
      "Use auto, shm, tcp, ucx, or \"shm,ucx\": shared memory on one host and UCX between hosts");
}

}  // namespace muster::rpc
