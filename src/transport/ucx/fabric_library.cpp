#include "transport/ucx/fabric_library.h"

#include <dlfcn.h>
#include <signal.h>

#include <array>

#include "base/plugin.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::transport::ucx {
namespace {

// UCX installs handlers for the signals of crashes when it is loaded, as its environment says. These signals belong to
// the program and the launcher (base/crash_report.h), so load() puts the previous handlers back.
Plugin load() {
  constexpr std::array kCrashes{SIGILL, SIGTRAP, SIGABRT, SIGBUS, SIGFPE, SIGSEGV};
  std::array<struct sigaction, kCrashes.size()> handlers;
  for (size_t i = 0; i < kCrashes.size(); ++i) ::sigaction(kCrashes[i], nullptr, &handlers[i]);
  auto plugin = load_plugin("libmuster_ucx.so", kMakeFabric, RTLD_LOCAL, "install UCX (apt-get install libucx-dev)");
  for (size_t i = 0; i < kCrashes.size(); ++i) ::sigaction(kCrashes[i], &handlers[i], nullptr);
  return plugin;
}

const Plugin& plugin() {
  static const Plugin loaded = load();
  return loaded;
}

}  // namespace

std::string unavailable_reason() { return plugin().problem; }

std::unique_ptr<Fabric> make_ucx_fabric(const Settings& settings, FabricEvents& events) {
  const auto make = reinterpret_cast<MakeFabric>(plugin().function);
  if (!make) throw Unavailable(text("there is no ucx transport: ", plugin().problem));
  std::string problem;
  std::unique_ptr<Fabric> fabric(make(settings, events, problem));
  if (!fabric)
    throw Unavailable(text("UCX cannot serve: ", problem),
                      "Check UCX_TLS and UCX_NET_DEVICES; UCX_LOG_LEVEL=info tells more");
  return fabric;
}

}  // namespace muster::transport::ucx
