#include "parallel/fsdp/shared_parameters.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstring>
#include <limits>
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

// A number that no other set of shared parameters in this World has. Unavailable, on every rank, if a host has no `bytes`
// of memory.
int64_t next_number(const World& world, size_t bytes, const Group& group) {
  int64_t values[2] = {std::numeric_limits<int64_t>::max(), static_cast<int64_t>(shm::memory_available())};
  if (group.rank() == 0) values[0] = world.store().add(world.parts().prefix + "/fsdp/count", 1);
  all_reduce(at::from_blob(values, {2}, at::kLong), {.op = ReduceOp::MIN, .group = group});
  if (bytes > static_cast<size_t>(values[1]))
    throw Unavailable(
        text("the parameters need ", bytes, " bytes of shared memory, but only ", values[1], " are available"),
        "Use a smaller model, or a host with more memory");
  return values[0];
}

struct Memory {
  UniqueFd own;
  std::map<int, std::shared_ptr<shm::Mapping>> mapped;  // by rank in the group
};

// Every rank of the host makes memory of `bytes`, and maps that of all. Nothing of it is committed yet.
Memory share_memory(std::map<int, size_t>& bytes, const std::vector<int>& host, const Group& group,
                    const World& world) {
  const World::Parts& parts = world.parts();
  shm::KnownRanks known;
  int place = 0;  // of this rank on the host
  size_t total = 0;
  for (const int rank : host) {
    if (rank == group.rank()) place = static_cast<int>(known.pids.size());
    known.shown.push_back(group.global_rank(rank));
    known.pids.push_back(parts.members[static_cast<size_t>(known.shown.back())].pid);
    total += bytes[rank];
  }
  const std::string key = text(parts.prefix, "/fsdp/", next_number(world, total, group), '/', known.shown[0]);
  Memory memory{.own = shm::create_memfd("muster-parameters", std::max(bytes[group.rank()], kLine))};
  const auto participants = shm::exchange(world.store(), key, place, static_cast<int>(host.size()), {memory.own.get()},
                                          Deadline::after(parts.options.timeout), known);
  for (size_t i = 0; i < participants.size(); ++i) {
    const int rank = host[i];
    auto& mapped = memory.mapped[rank];
    if (participants[i].fds.size() == 1) mapped = shm::map_memfd(participants[i].fds[0].get());
    if (!mapped || mapped->size() < bytes[rank])
      throw CorruptError(text("rank ", known.shown[i], " sent no memory for its parameters"),
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

// What a rank has found out about a parameter. With the rank it makes one number; of all ranks' the largest counts.
enum class Change : int32_t { kNone, kUpdated, kReplacedElsewhere, kReplaced, kUpdatedWhileRead, kForeign, kReshaped };
constexpr int32_t kRanks = 1 << 24;
int32_t packed(Change change, int rank) { return static_cast<int32_t>(change) * kRanks + rank; }
Change change_of(int32_t packed) { return static_cast<Change>(packed / kRanks); }

constexpr char kWhileRead[] =
    " after a forward() that no backward() followed, while other ranks may still have read it";
constexpr char kSynchronize[] = "Call synchronize() before such a change";

}  // namespace

SharedParameters::SharedParameters(const std::vector<parallel::NamedTensor>& parameters, const std::vector<int>& places,
                                   Hosts hosts, const Group& group, const World& world)
    : group_(group), hosts_(std::move(hosts)) {
  require_own_memory(parameters);
  std::map<int, size_t> used;  // bytes in each rank's memory
  std::vector<size_t> offsets;
  for (size_t i = 0; i < parameters.size(); ++i) {
    size_t& end = used[hosts_.owner(places[i])];
    offsets.push_back(end);
    end += room_for(parameters[i].tensor);
  }
  const Memory memory = share_memory(used, hosts_.ranks[hosts_.own], group, world);
  // One after the other, so that a parameter's private memory is free before the next one's shared memory is taken.
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const int owner = hosts_.owner(places[i]);
    const bool is_mine = owner == group.rank();
    Entry& entry = entries_.emplace_back(Entry{.name = name, .tensor = tensor, .place = places[i]});
    entry.shared = parallel::shared_tensor(memory.mapped.at(owner), offsets[i], tensor, is_mine);
    if (is_mine && tensor.numel() > 0) {
      shm::commit(memory.own.get(), offsets[i], room_for(tensor));
      entry.shared.copy_(tensor);
    }
    entry.tensor.set_data(entry.shared);
    remember(entry);
  }
  barrier({.group = group});  // all owners have written
}

bool SharedParameters::is_mine(const Entry& entry) const { return hosts_.owner(entry.place) == group_.rank(); }

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
  for (size_t i = 0; i < entries_.size(); ++i)
    changes.push_back(is_mine(entries_[i]) && change_of(changes[i]) == Change::kNone ? 1 + group_.rank() : 0);
  return changes;
}

void SharedParameters::before_forward(std::vector<int32_t> changes) {
  all_reduce(at::from_blob(changes.data(), {static_cast<int64_t>(changes.size())}, at::kInt),
             {.op = ReduceOp::MAX, .group = group_});
  reading_ = false;
  throw_if_wrong(changes);

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

// All ranks throw the same, and have forgotten the change. `changes`: those of all ranks.
void SharedParameters::throw_if_wrong(const std::vector<int32_t>& changes) {
  const auto is_good = [](Change change) { return change <= Change::kUpdated || change == Change::kReplaced; };
  const size_t count = entries_.size();
  size_t worst = 0;
  for (size_t i = 1; i < count; ++i)
    if (change_of(changes[i]) > change_of(changes[worst])) worst = i;
  if (count == 0) return;
  if (is_good(change_of(changes[worst]))) {  // then owners on all hosts must have done the same
    for (worst = 0; worst < count; ++worst)
      if (change_of(changes[worst]) != Change::kNone && changes[count + worst] > 0) break;
    if (worst == count) return;
  }
  for (Entry& each : entries_) remember(each);
  const Entry& entry = entries_[worst];
  const Change change = change_of(changes[worst]);
  const int changer = changes[worst] % kRanks;
  const std::string rank = text("rank ", group_.global_rank(changer)), name = text("parameter ", entry.name),
                    owner = text("rank ", group_.global_rank(hosts_.owner_beside(changer, entry.place)));
  if (is_good(change))
    throw InvalidArgument(text(rank, " changed ", name, ", but rank ", group_.global_rank(changes[count + worst] - 1),
                               ", which owns it on another host, did not"),
                          "Change parameters on every host alike");
  if (change == Change::kReshaped)
    throw InvalidArgument(text(rank, " changed the shape, dtype or device of ", name),
                          "Change the module before FullyShardedDataParallel is made");
  if (change == Change::kForeign)
    throw InvalidArgument(text(rank, " changed ", name, ", which ", owner, " owns; all ranks share its memory"),
                          "Change only what owned_parameters() returns, on every rank");
  if (change == Change::kReplacedElsewhere)
    throw InvalidArgument(text(name, " has new values on ", rank, ", but not on ", owner, ", which owns it"),
                          "Load a module on every rank");
  throw InvalidArgument(text(rank, " changed ", name, kWhileRead), kSynchronize);
}

bool SharedParameters::may_go_on(const std::vector<int32_t>& changes) const {
  if (!reading_) return false;
  for (size_t i = 0; i < entries_.size(); ++i)
    if (change_of(changes[i]) != Change::kNone)
      throw InvalidArgument(text("this rank changed parameter ", entries_[i].name, kWhileRead), kSynchronize);
  return true;
}

void SharedParameters::synchronize() {
  barrier({.group = group_});
  reading_ = false;
}

}  // namespace muster::fsdp
