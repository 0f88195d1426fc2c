#include "muster/parallel/hogwild.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <atomic>
#include <cstddef>
#include <exception>
#include <string>
#include <vector>

#include "base/text.h"
#include "comm/world/world_parts.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "parallel/kit/buckets.h"
#include "parallel/kit/host_memory.h"
#include "parallel/kit/hosts.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/same_module.h"
#include "shm/futex.h"
#include "shm/peer_watch.h"

namespace muster {
namespace {

constexpr size_t kLine = 64;  // bytes; ranks that write different lines do not disturb each other

}  // namespace

struct Hogwild::Impl {
  // In shared memory, whose bytes are zero at first.
  struct alignas(kLine) StepClock {
    std::atomic<int64_t> steps;
    std::atomic<bool> left;
  };
  struct alignas(kLine) Progress {
    std::atomic<uint32_t> changes;   // of any clock; ranks sleep on it
    std::atomic<uint32_t> sleepers;  // too many if one has died: then a wake-up may be for nobody
  };

  Group group;  // resolved
  HogwildOptions options;
  std::shared_ptr<shm::Mapping> memory;
  Progress* progress = nullptr;
  StepClock* clocks = nullptr;  // by rank
  std::shared_ptr<shm::PeerWatch> watch;
  std::vector<pid_t> pids;  // by rank
  std::vector<std::atomic<bool>> dead;
  uint64_t subscription = 0;

  StepClock& own() const { return clocks[group.rank()]; }
  ~Impl() {
    if (watch) watch->unsubscribe(subscription);
  }
  void move_to_shared_memory(const std::vector<parallel::NamedTensor>& shared, World& world);
  void watch_others(const World& world);
  void notify() const;
  void wait(int64_t steps) const;
  std::vector<int> behind(int64_t least) const;
};

// One tensor at a time, so that the module's own memory is free before more shared memory is taken.
void Hogwild::Impl::move_to_shared_memory(const std::vector<parallel::NamedTensor>& shared, World& world) {
  const at::NoGradGuard no_grad;
  const size_t first = sizeof(Progress) + static_cast<size_t>(group.size()) * sizeof(StepClock);
  size_t bytes = first;
  for (const auto& [name, tensor] : shared) bytes += shm::round_up(tensor.nbytes(), kLine);
  const bool is_first = group.rank() == 0;
  const parallel::Hosts hosts = parallel::hosts_of(group, world);
  if (hosts.ranks.size() > 1)
    throw InvalidArgument(text("the ranks of a Hogwild: expected one host, got ", hosts.ranks.size()),
                          "Give each host a group of its own, and average the models with a ModelAverager");
  const parallel::HostMemory memories = parallel::share_memory(is_first ? bytes : 0, bytes, hosts, group, world);
  memory = memories.mapped[0];
  std::exception_ptr failure;
  if (is_first) try {
      shm::commit(memories.own.get(), 0, bytes);
    } catch (const std::exception&) {
      failure = std::current_exception();
    }
  parallel::throw_if_any_failed(failure, group, "could not take memory for the parameters");
  progress = reinterpret_cast<Progress*>(memory->data());
  clocks = reinterpret_cast<StepClock*>(memory->data() + sizeof(Progress));
  size_t at = first;
  for (const auto& [name, tensor] : shared) {
    const at::Tensor values =
        parallel::tensor_at(c10::InefficientStdFunctionContext::makeDataPtr(
                                memory->data() + at, [keeper = memory](void*) {}, c10::Device(c10::DeviceType::CPU)),
                            tensor);
    at += shm::round_up(tensor.nbytes(), kLine);
    if (is_first) values.copy_(tensor);
    tensor.set_data(values);
  }
}

void Hogwild::Impl::watch_others(const World& world) {
  const auto& members = world.parts().members;
  std::vector<shm::PeerWatch::Process> processes;
  for (int rank = 0; rank < group.size(); ++rank) {
    const auto& member = members[static_cast<size_t>(group.global_rank(rank))];
    pids.push_back(member.pid);
    processes.emplace_back(member.pid, member.start);
  }
  dead = std::vector<std::atomic<bool>>(pids.size());
  const auto on_death = [this](pid_t pid) {
    for (size_t rank = 0; rank < pids.size(); ++rank)
      if (pids[rank] == pid) dead[rank] = true;
    notify();
  };
  subscription = world.parts().watch->subscribe(processes, on_death);
  watch = world.parts().watch;
}

void Hogwild::Impl::notify() const {
  progress->changes.fetch_add(1);
  if (progress->sleepers.load() > 0) shm::futex_wake_all(progress->changes);
}

// The ranks that have made fewer steps than so many, and have not left.
std::vector<int> Hogwild::Impl::behind(int64_t least) const {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank)
    if (clocks[rank].steps.load(std::memory_order_acquire) < least &&
        !clocks[rank].left.load(std::memory_order_acquire))
      ranks.push_back(rank);
  return ranks;
}

void Hogwild::Impl::wait(int64_t steps) const {
  const int64_t least = steps - *options.max_staleness;
  const auto deadline = Deadline::after(options.timeout);
  for (;;) {
    const uint32_t before = progress->changes.load();
    const std::vector<int> ranks = behind(least);
    if (ranks.empty()) return;
    for (const int rank : ranks)
      if (dead[static_cast<size_t>(rank)].load()) {
        const auto pid = pids[static_cast<size_t>(rank)];
        throw PeerLost(rank, pid,
                       text("rank ", group.global_rank(rank), " (pid ", pid, ") died after ", clocks[rank].steps.load(),
                            " steps, and others wait for it in Hogwild::step()"));
      }
    if (deadline.passed()) {
      std::vector<int> numbers;
      for (const int rank : ranks) numbers.push_back(group.global_rank(rank));
      throw TimeoutError(text("rank", numbers.size() > 1 ? "s " : " ", join(numbers), " did not come to step ", least,
                              " within ", options.timeout.count(), " ms, and this rank has made ", steps),
                         ranks, "Let ranks that make no more steps call leave(), or raise max_staleness or timeout");
    }
    progress->sleepers.fetch_add(1);
    shm::futex_wait(progress->changes, before, deadline.left());
    progress->sleepers.fetch_sub(1);
  }
}

Hogwild::Hogwild(torch::nn::Module& module, HogwildOptions options) : impl_(std::make_unique<Impl>()) {
  Impl& s = *impl_;
  World& world = World::current();
  s.group = options.group.resolved();
  s.options = std::move(options);
  if (s.options.timeout.count() == 0) s.options.timeout = world.parts().options.timeout;
  if (!s.group.is_member()) throw InvalidArgument("this rank is not a member of the Hogwild's group");
  if (s.options.max_staleness.value_or(0) < 0)
    throw InvalidArgument(text("HogwildOptions::max_staleness: expected 0 or more, got ", *s.options.max_staleness),
                          "Use 0 or more");
  const auto tensors = parallel::tensors_of(module);
  for (const auto& [name, tensor] : tensors.all)
    if (!tensor.device().is_cpu() || tensor.layout() != at::kStrided || parallel::may_be_watched(tensor))
      throw InvalidArgument(
          text(name, " is not a dense CPU tensor of this module alone"),
          "Use a module on the CPU that has no FullyShardedDataParallel and no copies for mixed precision");
  std::vector<parallel::NamedTensor> once = tensors.parameters;
  for (const auto& buffer : tensors.buffers)
    if (std::none_of(once.begin(), once.end(), [&](const auto& other) { return other.tensor.is_same(buffer.tensor); }))
      once.push_back(buffer);
  parallel::require_own_memory(once);
  parallel::require_same_on_all_ranks(
      tensors.all,
      text("max_staleness=", s.options.max_staleness.value_or(-1), " share_buffers=", s.options.share_buffers),
      s.group);
  if (!s.options.share_buffers) once.resize(tensors.parameters.size());
  s.move_to_shared_memory(once, world);
  std::exception_ptr failure;
  try {
    s.watch_others(world);
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  parallel::throw_if_any_failed(failure, s.group,
                                "could not watch the others");  // after this rank 0's values are there
}

Hogwild::~Hogwild() { leave(); }

void Hogwild::step() {
  Impl& s = *impl_;
  if (s.own().left) throw InvalidArgument("Hogwild::step() is called after leave()");
  const int64_t steps = s.own().steps.load(std::memory_order_relaxed) + 1;
  s.own().steps.store(steps, std::memory_order_release);
  s.notify();
  if (s.options.max_staleness) s.wait(steps);
}

void Hogwild::leave() {
  impl_->own().left.store(true, std::memory_order_release);
  impl_->notify();
}

int64_t Hogwild::steps(int rank) const {
  const Impl& s = *impl_;
  if (rank < 0 || rank >= s.group.size())
    throw InvalidArgument(text("rank of the Hogwild: expected 0 to ", s.group.size() - 1, ", got ", rank));
  return s.clocks[rank].steps.load(std::memory_order_acquire);
}

}  // namespace muster
