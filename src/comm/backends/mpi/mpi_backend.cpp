#include "comm/backends/mpi/mpi_backend.h"

#include <dlfcn.h>

#include "base/env.h"
#include "base/plugin.h"
#include "comm/backends/mpi/mpi_wire.h"
#include "comm/wire/mailbox.h"
#include "comm/wire/wire_backend.h"
#include "shm/spin.h"

namespace muster::comm::mpi_backend {
namespace {

const Plugin& plugin() {
  static const Plugin loaded =
      load_plugin("libmuster_mpi.so", kMakeWire, RTLD_GLOBAL,  // global: MPI loads parts of its own
                  "install an MPI (apt-get install libopenmpi-dev)");
  return loaded;
}

// The wire of a group of one rank: it carries messages of the rank to itself, without MPI.
class OwnWire final : public Wire {
 public:
  ~OwnWire() override { close(); }
  std::unique_ptr<Transfer> send(int, WireTag tag, const std::byte* data, size_t bytes) override {
    mailbox_->deliver(0, tag, data, bytes);
    return std::make_unique<Delivered>();
  }
  std::unique_ptr<Transfer> receive(int peer, WireTag tag, std::byte* data, size_t bytes) override {
    return mailbox_->receive(peer, tag, data, bytes);
  }
  void on_gone(std::function<void(int)>) override {}  // there is no peer
  int take(WireTag tag, std::byte* data, size_t bytes) override { return mailbox_->take(tag, data, bytes); }
  std::vector<int> gone() override { return {}; }
  void close() override { mailbox_->close(kAnySource, "the group is closed"); }

 private:
  struct Delivered final : Transfer {
    int wait(Deadline) override { return 0; }
  };
  const std::shared_ptr<Mailbox> mailbox_ = std::make_shared<Mailbox>(0);
};

}  // namespace

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  const auto make_wire = reinterpret_cast<MakeWire>(plugin().function);
  if (!make_wire) throw Unavailable(plugin().problem);
  if (context.group.size == 1) return c10::make_intrusive<WireBackend>(context, "mpi", std::make_unique<OwnWire>());
  static_assert(kAnySource < 0);  // libmuster_mpi.so takes any negative peer for any source
  const WireContext site{
      .rank = context.group.rank,
      .size = context.group.size,
      .group_name = context.group.name,
      .prefix = context.group.store_prefix,
      .store = context.group.store.get(),
      .deadline = Deadline::after(context.group.timeout),
      .spin = shm::spin_for(context.host.local_ranks, context.host.cores),
      .timeout = [] { throw TimeoutError(""); },
      .unavailable = [](const std::string& what, const std::string& advice) { throw Unavailable(what, advice); }};
  std::unique_ptr<Wire> wire(make_wire(site));
  return c10::make_intrusive<WireBackend>(context, "mpi", std::move(wire));
}

std::string unavailable_reason() {
  if (!env_string("OMPI_COMM_WORLD_RANK") && !env_string("PMI_RANK") && !env_string("PMIX_RANK"))
    return "this process was not started by mpirun or by srun with PMI";
  return plugin().problem;
}

}  // namespace muster::comm::mpi_backend
