#include "parallel/fsdp/shared_parameters.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "base/text.h"
#include "comm/world/world_parts.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/shared_tensor.h"
#include "shm/exchange.h"
#include "shm/mapping.h"

namespace muster::fsdp {
namespace {

constexpr size_t kLine = 128;  // two cache lines: what adjacent-line prefetch fetches together

size_t room_for(const at::Tensor& tensor) { return shm::round_up(tensor.nbytes(), kLine); }

// Rank 0 finds out for all ranks: a number that no other set of shared parameters in this World has. Unavailable, on
// every rank, if the host has no `bytes` of memory.
int64_t next_number(const World& world, size_t bytes, const Group& group) {
  int64_t values[2] = {0, 0};  // the number, the available memory
  if (group.rank() == 0) {
    values[0] = world.store().add(world.parts().prefix + "/fsdp/count", 1);
    values[1] = static_cast<int64_t>(shm::memory_available());
  }
  broadcast(at::from_blob(values, {2}, at::kLong), 0, {.group = group});
  if (bytes > static_cast<size_t>(values[1]))
    throw Unavailable(
        text("the parameters need ", bytes, " bytes of shared memory, but only ", values[1], " are available"),
        "Use a smaller model, or a host with more memory");
  return values[0];
}

struct Memory {
  UniqueFd own;
  std::vector<std::shared_ptr<shm::Mapping>> mapped;  // by rank in the group
};

// Every rank makes memory of bytes[rank], and maps that of all. Nothing of it is committed yet.
Memory share_memory(const std::vector<size_t>& bytes, const Group& group, const World& world) {
  const World::Parts& parts = world.parts();
  std::vector<pid_t> pids;
  for (const int rank : group.ranks()) {
    const auto& member = parts.members[static_cast<size_t>(rank)];
    if (member.host != parts.members[static_cast<size_t>(group.global_rank(0))].host)
      throw InvalidArgument(text("the ranks ", group.global_rank(0), " and ", rank, " are on different hosts"),
                            "Give FullyShardedDataParallel a group of one host's ranks");
    pids.push_back(member.pid);
  }
  size_t total = 0;
  for (const size_t of_rank : bytes) total += of_rank;
  const std::string key = text(parts.prefix, "/fsdp/", next_number(world, total, group));
  const size_t mine = bytes[static_cast<size_t>(group.rank())];
  Memory memory{.own = shm::create_memfd("muster-parameters", std::max(mine, kLine))};
  const auto participants = shm::exchange(world.store(), key, group.rank(), group.size(), {memory.own.get()},
                                          Deadline::after(parts.options.timeout), {pids, group.ranks()});
  for (size_t rank = 0; rank < participants.size(); ++rank) {
    if (participants[rank].fds.size() == 1) memory.mapped.push_back(shm::map_memfd(participants[rank].fds[0].get()));
    if (memory.mapped.size() != rank + 1 || memory.mapped[rank]->size() < bytes[rank])
      throw CorruptError(text("rank ", group.global_rank(static_cast<int>(rank)), " sent no memory for its parameters"),
                         "Run the same version of Muster on all ranks");
  }
  return memory;
}

// Tensors of one memory would become tensors of several.
void require_own_memory(const std::vector<parallel::NamedTensor>& parameters) {
  std::map<const void*, std::string> known;  // by storage
  for (const auto& [name, tensor] : parameters) {
    if (tensor.numel() == 0) continue;
    const auto [other, is_new] = known.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    if (!is_new)
      throw InvalidArgument(text("parameters ", other->second, " and ", name, " are two tensors in the same memory"),
                            "Register one tensor under both names, or give each its own memory");
  }
}

// A few of the tensor's bytes. Optimizers that write through Tensor::data() (libtorch's SGD) leave no other trace.
uint64_t sample_of(const at::Tensor& tensor) {
  constexpr size_t kSamples = 4;
  const size_t bytes = tensor.nbytes(), width = std::min(bytes, sizeof(uint64_t));
  const auto* const data = static_cast<const std::byte*>(tensor.const_data_ptr());
  uint64_t mixed = 0;
  for (size_t i = 0; i < kSamples && width > 0; ++i) {
    uint64_t word = 0;
    std::memcpy(&word, data + (bytes - width) * i / (kSamples - 1), width);
    mixed = (mixed ^ word) * 0x9E3779B97F4A7C15;
  }
  return mixed;
}

// What a rank has found out about a parameter; of several the largest counts. `shown`: the rank that found it.
enum class Change : int32_t { kNone, kUpdated, kReplacedElsewhere, kReplaced, kUpdatedWhileRead, kForeign, kReshaped };
constexpr int32_t kRanks = 1 << 24;
int32_t packed(Change change, int rank) { return static_cast<int32_t>(change) * kRanks + rank; }
Change change_of(int32_t packed) { return static_cast<Change>(packed / kRanks); }

}  // namespace

SharedParameters::SharedParameters(const std::vector<parallel::NamedTensor>& parameters, const std::vector<int>& owners,
                                   const Group& group, const World& world)
    : group_(group) {
  require_own_memory(parameters);
  std::vector<size_t> used(static_cast<size_t>(group.size()));  // bytes in each rank's memory
  std::vector<size_t> offsets;
  for (size_t i = 0; i < parameters.size(); ++i) {
    size_t& end = used[static_cast<size_t>(owners[i])];
    offsets.push_back(end);
    end += room_for(parameters[i].tensor);
  }
  const Memory memory = share_memory(used, group, world);
  // One after the other, so that a parameter's private memory is free before the next one's shared memory is taken.
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const bool is_mine = owners[i] == group.rank();
    Entry& entry = entries_.emplace_back(Entry{.name = name, .tensor = tensor, .owner = owners[i]});
    entry.shared = parallel::shared_tensor(memory.mapped[static_cast<size_t>(owners[i])], offsets[i], tensor, is_mine);
    if (is_mine && tensor.numel() > 0) {
      shm::commit(memory.own.get(), offsets[i], room_for(tensor));
      entry.shared.copy_(tensor);
    }
    entry.tensor.set_data(entry.shared);
    remember(entry);
  }
  barrier({.group = group});  // all owners have written
}

bool SharedParameters::is_mine(const Entry& entry) const { return entry.owner == group_.rank(); }

void SharedParameters::remember(Entry& entry) const {
  entry.version = entry.tensor._version();
  if (is_mine(entry)) entry.sample = sample_of(entry.tensor);
}

std::vector<int32_t> SharedParameters::changes() const {
  std::vector<int32_t> changes;
  for (const Entry& entry : entries_) {
    Change change = Change::kNone;
    const at::Tensor &tensor = entry.tensor, &shared = entry.shared;
    const bool is_written = tensor._version() != entry.version;
    if (tensor.sizes() != shared.sizes() || tensor.scalar_type() != shared.scalar_type() ||
        tensor.device() != shared.device() || tensor.layout() != shared.layout())
      change = Change::kReshaped;
    else if (!tensor.is_alias_of(shared))
      change = is_mine(entry) ? Change::kReplaced : Change::kReplacedElsewhere;
    else if (is_written && !is_mine(entry))
      change = Change::kForeign;
    else if (reading_ && (is_written || (is_mine(entry) && sample_of(tensor) != entry.sample)))
      change = Change::kUpdatedWhileRead;
    else if (is_written)
      change = Change::kUpdated;
    changes.push_back(packed(change, group_.rank()));
  }
  return changes;
}

void SharedParameters::before_forward(std::vector<int32_t> changes) {
  all_reduce(at::from_blob(changes.data(), {static_cast<int64_t>(changes.size())}, at::kInt),
             {.op = ReduceOp::MAX, .group = group_});
  reading_ = false;
  const size_t worst =
      static_cast<size_t>(std::max_element(changes.begin(), changes.end(),
                                           [](int32_t a, int32_t b) { return change_of(a) < change_of(b); }) -
                          changes.begin());
  if (!changes.empty()) throw_if_wrong(entries_[worst], changes[worst]);

  const at::NoGradGuard no_grad;
  bool any_replaced = false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const Change change = change_of(changes[i]);
    if (change == Change::kReplaced && is_mine(entry)) entry.shared.copy_(entry.tensor);
    if (change == Change::kUpdated && !is_mine(entry)) torch::autograd::impl::bump_version(entry.tensor);
    any_replaced |= change == Change::kReplaced;
  }
  if (any_replaced) barrier({.group = group_});
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_alias_of(entry.shared)) entry.tensor.set_data(entry.shared);
    remember(entry);
  }
  reading_ = true;
}

// All ranks throw the same, and have forgotten the change.
void SharedParameters::throw_if_wrong(const Entry& entry, int32_t packed) {
  const Change change = change_of(packed);
  if (change <= Change::kUpdated || change == Change::kReplaced) return;
  for (Entry& each : entries_) remember(each);
  const std::string rank = text("rank ", group_.global_rank(packed % kRanks)), name = text("parameter ", entry.name),
                    owner = text("rank ", group_.global_rank(entry.owner));
  if (change == Change::kReshaped)
    throw InvalidArgument(text(rank, " changed the shape, dtype or device of ", name),
                          "Change the module before FullyShardedDataParallel is made");
  if (change == Change::kForeign)
    throw InvalidArgument(text(rank, " changed ", name, ", which ", owner, " owns; all ranks share its memory"),
                          "Change only what owned_parameters() returns, on every rank");
  if (change == Change::kReplacedElsewhere)
    throw InvalidArgument(text(name, " has new values on ", rank, ", but not on ", owner, ", which owns it"),
                          "Load a module on every rank");
  throw InvalidArgument(text(rank, " changed ", name,
                             " after a forward() that no backward() followed, while others may still have read it"),
                        "Call synchronize() before such a change");
}

bool SharedParameters::may_go_on(const std::vector<int32_t>& changes) const {
  if (!reading_) return false;
  for (size_t i = 0; i < changes.size(); ++i)
    if (change_of(changes[i]) != Change::kNone)
      throw InvalidArgument(text("parameter ", entries_[i].name, " has changed after a forward() that no backward() ",
                                 "followed, while other ranks may still have read it"),
                            "Call synchronize() before such a change");
  return true;
}

void SharedParameters::synchronize() {
  barrier({.group = group_});
  reading_ = false;
}

}  // namespace muster::fsdp
