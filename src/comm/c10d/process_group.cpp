#include "muster/comm/process_group.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/core/backend.h"
#include "comm/core/c10d_errors.h"
#include "comm/world/heaps.h"
#include "comm/world/meeting.h"
#include "muster/base/error.h"
#include "muster/store/c10d_store.h"
#include "shm/arena.h"
#include "shm/black_box.h"
#include "shm/peer_watch.h"

namespace muster::comm {
namespace {

// The groups that this process is a member of. Never destroyed, because the interpreter may drop groups after static
// destructors have run.
class Memberships {
 public:
  static Memberships& instance() {
    static auto* const memberships = new Memberships;
    return *memberships;
  }

  std::shared_ptr<shm::PeerWatch> watch() {
    const std::lock_guard lock(mutex_);
    if (!watch_ || pid_ != ::getpid()) {
      if (watch_) (void)new std::shared_ptr(std::move(watch_));  // leaked: its thread runs in the parent
      watch_ = std::make_shared<shm::PeerWatch>();
      pid_ = ::getpid();
    }
    return watch_;
  }

  // One heap for all groups of this process.
  struct ProcessHeap {
    pid_t pid = 0;
    std::shared_ptr<shm::Arena> arena;
    std::shared_ptr<Heap> heap;
  };
  ProcessHeap heap() {
    const std::lock_guard lock(mutex_);
    if (heap_.pid != ::getpid()) {
      if (heap_.heap) (void)new ProcessHeap(std::move(heap_));  // leaked: its tensors may live on in this fork
      auto arena =
          std::make_shared<shm::Arena>(default_heap_capacity(static_cast<int>(env_int("WORLD_SIZE").value_or(1))));
      heap_ = {.pid = ::getpid(), .arena = arena, .heap = make_heap(arena)};
    }
    return heap_;
  }

  // One black box for all groups of this process, which is one rank of its job.
  std::shared_ptr<shm::BlackBox> black_box(int rank, int size) {
    const std::lock_guard lock(mutex_);
    if (!black_box_ || black_box_pid_ != ::getpid()) {
      black_box_ = shm::open_black_box(static_cast<int>(env_int("RANK").value_or(rank)),
                                       static_cast<int>(env_int("WORLD_SIZE").value_or(size)));
      black_box_pid_ = ::getpid();
    }
    return black_box_;
  }

  // How many ranks compete for how many cores of this host, according to the largest group so far, which is the job's.
  // A smaller group knows only its own members.
  std::pair<int, int> crowd(int ranks, int cores) {
    const std::lock_guard lock(mutex_);
    if (ranks >= crowd_.first) crowd_ = {ranks, cores};
    return crowd_;
  }

  void add(const c10::intrusive_ptr<Backend>& backend) {
    const std::lock_guard lock(mutex_);
    backends_.emplace_back(backend);
  }

  void remove(const Backend* backend) {
    const std::lock_guard lock(mutex_);
    std::erase_if(backends_, [&](const auto& entry) { return entry._unsafe_get_target() == backend; });
  }

  void leave(const std::string& cause) {
    std::vector<c10::intrusive_ptr<Backend>> alive;
    {
      const std::lock_guard lock(mutex_);
      if (pid_ != ::getpid()) return;
      alive = lock_all();
    }
    // The default group last: it is the one in which the peers learn the cause.
    for (auto backend = alive.rbegin(); backend != alive.rend(); ++backend) (*backend)->leave(cause);
  }

 private:
  using Weak = c10::weak_intrusive_ptr<Backend>;

  Memberships() {
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] {
                       // Keeps one more reference to each for ever, so that nothing destroys them.
                       for (auto& backend : instance().lock_all()) (void)backend.release();
                       instance().backends_.clear();
                       instance().mutex_.unlock();
                     });
  }

  std::vector<c10::intrusive_ptr<Backend>> lock_all() const {
    std::vector<c10::intrusive_ptr<Backend>> alive;
    for (const auto& entry : backends_)
      if (auto backend = entry.lock()) alive.push_back(std::move(backend));
    return alive;
  }

  std::mutex mutex_;
  pid_t pid_ = 0;
  std::shared_ptr<shm::PeerWatch> watch_;
  ProcessHeap heap_;
  pid_t black_box_pid_ = 0;
  std::shared_ptr<shm::BlackBox> black_box_;
  std::vector<Weak> backends_;
  std::pair<int, int> crowd_{0, 1};
};

class NamedProcessGroup final : public c10d::ProcessGroup {
 public:
  using c10d::ProcessGroup::ProcessGroup;
  const std::string getBackendName() const override { return "muster"; }
  void setSequenceNumberForGroup() override { getDefaultBackend()->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return getDefaultBackend()->getSequenceNumberForGroup(); }
};

}  // namespace
}  // namespace muster::comm

namespace muster {

c10::intrusive_ptr<c10d::Backend> create_process_group_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                               int size, const ProcessGroupOptions& options) {
  try {
    if (size < 1 || rank < 0 || rank >= size)
      throw InvalidArgument(text("rank: expected 0 to ", size - 1, " in a group of ", size, ", got ", rank));
    if (!options.global_ranks.empty() && options.global_ranks.size() != static_cast<size_t>(size))
      throw InvalidArgument(
          text("global_ranks: expected one for each of ", size, " ranks, got ", options.global_ranks.size()));
    const std::shared_ptr<Store> ours = from_c10d(store);
    comm::Memberships& memberships = comm::Memberships::instance();
    const std::string prefix = text("muster/group/", ours->add(text("muster/groups/", rank), 1));
    const auto deadline = Deadline::after(options.timeout);
    // What can fail on this rank alone comes before the meeting.
    comm::BackendContext context{.group = {},
                                 .host = {.arena = memberships.heap().arena,
                                          .watch = memberships.watch(),
                                          .black_box = memberships.black_box(rank, size)},
                                 .options = {.faults = FaultPlan::parse(env_string("MUSTER_FAULTS").value_or("")),
                                             .for_pytorch = true,
                                             .on_leave = [&memberships](const comm::Backend* backend) {
                                               memberships.remove(backend);
                                               backend->warn_of_straggler();
                                             }}};
    context.group = {.name = options.name,
                     .store_prefix = prefix,
                     .store = ours,
                     .rank = rank,
                     .size = size,
                     .timeout = options.timeout,
                     .members = comm::meet_members(*ours, prefix, rank, size, comm::host_identity(), deadline),
                     .global_ranks = options.global_ranks,
                     .shown_ranks = options.global_ranks};
    std::tie(context.host.local_ranks, context.host.cores) = memberships.crowd(
        comm::ranks_of_host(context.group.members, rank), comm::cores_of_host(context.group.members, rank));
    context.host.heaps = comm::exchange_memory(*ours, prefix + "/heaps", rank, context.group.members,
                                               context.host.arena->fd(), deadline);
    // All ranks have read who the others are: otherwise they could not have exchanged their heaps.
    if (rank == 0 && comm::on_one_host(context.group.members)) comm::forget_members(*ours, prefix, size);
    const bool on_one_host = comm::on_one_host(context.group.members);
    auto backend = comm::create_backend("auto", context);
    // Over several hosts, when all are connected.
    if (rank == 0 && !on_one_host) comm::forget_members(*ours, prefix, size);
    memberships.add(backend);
    return backend;
  } catch (const Error&) {
    std::rethrow_exception(comm::as_c10d_error(std::current_exception(), options.timeout));
  }
}

c10::intrusive_ptr<c10d::ProcessGroup> create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                            int size, const ProcessGroupOptions& options) {
  auto backend = create_process_group_backend(store, rank, size, options);
  auto group = c10::make_intrusive<comm::NamedProcessGroup>(store, rank, size);
  group->setDefaultBackend(c10d::ProcessGroup::BackendType::CUSTOM);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, std::move(backend));
  return group;
}

std::shared_ptr<Heap> process_heap() { return comm::Memberships::instance().heap().heap; }

std::string straggler_report(const c10d::Backend& backend, std::chrono::nanoseconds at_least) {
  const auto* const ours = dynamic_cast<const comm::Backend*>(&backend);
  TORCH_CHECK_VALUE(ours, "the group's backend is '", backend.getBackendName(), "', not 'muster'");
  return ours->straggler_report(at_least);
}

void leave_process_groups(const std::string& cause) { comm::Memberships::instance().leave(cause); }

}  // namespace muster
