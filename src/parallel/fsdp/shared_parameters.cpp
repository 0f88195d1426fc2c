#include "parallel/fsdp/shared_parameters.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "comm/world/heaps.h"
#include "comm/world/world_parts.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/fsdp/layout.h"
#include "parallel/shared_tensor.h"
#include "parallel/watched.h"
#include "shm/mapping.h"

namespace muster::fsdp {
namespace {

// A number that no other set of shared parameters in this World has. Unavailable, on every rank, if a host has no `bytes`
// of memory now.
int64_t next_number(const World& world, size_t bytes, const Group& group) {
  int64_t values[2] = {std::numeric_limits<int64_t>::max(), static_cast<int64_t>(shm::memory_available())};
  if (group.rank() == 0) values[0] = world.store().add(world.parts().prefix + "/fsdp/count", 1);
  all_reduce(at::from_blob(values, {2}, at::kLong), {.op = ReduceOp::MIN, .group = group});
  if (bytes > static_cast<size_t>(values[1]))
    throw Unavailable(
        text("the parameters need ", bytes, " bytes of shared memory, but only ", values[1], " are available"),
        "Use a smaller model, or hosts with more memory");
  return values[0];
}

struct Memory {
  UniqueFd own;
  std::vector<std::shared_ptr<shm::Mapping>> mapped;  // by rank in the group; null for other hosts
};

// Every rank makes memory of bytes[its place], and maps that of its host's ranks. Nothing of it is committed yet; a host
// will need `at_most` bytes of it.
Memory share_memory(const std::vector<size_t>& bytes, size_t at_most, const parallel::Hosts& hosts, const Group& group,
                    const World& world) {
  const World::Parts& parts = world.parts();
  const std::string key = text(parts.prefix, "/fsdp/", next_number(world, at_most, group));
  const auto bytes_of = [&](int rank) {
    const auto place = static_cast<size_t>(hosts.place_of(rank));
    return place < bytes.size() ? bytes[place] : 0;
  };
  Memory memory{.own = shm::create_memfd("muster-parameters", std::max(bytes_of(group.rank()), shm::page_size()))};
  memory.mapped = comm::exchange_memory(world.store(), key, group.rank(), hosts.members, memory.own.get(),
                                        Deadline::after(parts.options.timeout), group.ranks());
  for (const int rank : hosts.here())
    if (memory.mapped[static_cast<size_t>(rank)]->size() < bytes_of(rank))
      throw CorruptError(text("rank ", group.global_rank(rank), " sent too little memory for its parameters"),
                         "Run the same version of Muster on all ranks");
  return memory;
}

std::shared_ptr<Gatherer> make_gatherer(const Layout& layout, const SharedParameters::Gathering& gathering,
                                        const Memory& memory, const parallel::Hosts& hosts, const Group& group) {
  const auto host = static_cast<int>(hosts.own);
  const int place = hosts.place_of(group.rank());
  const bool owns = place < hosts.owners;
  std::vector<std::byte*> of_places;
  for (int each = 0; each < hosts.owners; ++each)
    of_places.push_back(memory.mapped[static_cast<size_t>(hosts.owner(each))]->data());
  return std::make_shared<Gatherer>(
      Gatherer::Setup{.pieces = owns ? layout.pieces[static_cast<size_t>(place)]
                                     : decltype(Gatherer::Setup::pieces)(gathering.units.size()),
                      .elsewhere = layout.elsewhere(host, of_places),
                      .memory = memory.own.get(),
                      .mapped = memory.mapped[static_cast<size_t>(group.rank())],
                      .host = host,
                      .group = group,
                      .ranks_of_host = group.split(host, 0, {.name = "parameters on one host"}),
                      .column = group.split(owns ? place : -1, host, {.name = "parameters between hosts"}),
                      .most = gathering.most});
}

// Lets the gatherer know before a parameter of a unit is used.
void gather_before_use(parallel::Sharing& sharing, const std::weak_ptr<Gatherer>& gatherer, size_t unit,
                       bool is_at_home, const std::string& name) {
  sharing.before_use = [=](uint64_t operation, bool writes) {
    if (const auto at = gatherer.lock())
      at->before_use(unit, is_at_home, name, operation, writes);
    else if (!is_at_home)
      throw InvalidArgument(text("the values of parameter ", name, " are on another host"),
                            "Keep the FullyShardedDataParallel as long as you use its module");
  };
  sharing.is_here = [=] {
    const auto at = gatherer.lock();
    return is_at_home || (at && at->has_all());
  };
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

// What a rank has found out about a parameter.
enum class Change : int64_t { kNone, kUpdated, kReplacedElsewhere, kReplaced, kUpdatedWhileRead, kForeign, kReshaped };
bool is_good(Change change) { return change <= Change::kUpdated || change == Change::kReplaced; }

// A finding and the rank that has it, as a number: of several ranks', the largest counts.
constexpr int64_t kRanks = int64_t{1} << 24;
int64_t packed(int64_t finding, int rank) { return finding * kRanks + rank; }
int64_t packed(Change change, int rank) { return packed(static_cast<int64_t>(change), rank); }
int64_t finding_of(int64_t packed) { return packed / kRanks; }
int rank_of(int64_t packed) { return static_cast<int>(packed % kRanks); }
Change change_of(int64_t packed) { return static_cast<Change>(finding_of(packed)); }

// Of a sample, the upper bits, on which all of its bytes have an influence: so many fit into a number with a rank.
constexpr int kSampleBits = 38;
constexpr int64_t kLargestSample = (int64_t{1} << kSampleBits) - 1;

constexpr char kWhileRead[] =
    " after a forward() that no backward() followed, while other ranks may still have read it";
constexpr char kSynchronize[] = "Call synchronize() before such a change";

}  // namespace

void throw_if_any_failed(const std::exception_ptr& failure, const Group& group) {
  int64_t failed = failure ? group.rank() + 1 : 0;
  all_reduce(at::from_blob(&failed, {1}, at::kLong), {.op = ReduceOp::MAX, .group = group});
  if (failure) std::rethrow_exception(failure);
  if (failed != 0)
    throw InvalidArgument(text("rank ", group.global_rank(static_cast<int>(failed) - 1), " could not fill its tensors"),
                          "Look at its error");
}

SharedParameters::SharedParameters(const std::vector<parallel::NamedTensor>& parameters,
                                   const std::vector<Owner>& owners, parallel::Hosts hosts, const Group& group,
                                   const World& world, const Gathering& gathering, const Fill& fill)
    : group_(group), hosts_(std::move(hosts)) {
  require_own_memory(parameters);
  const Layout layout = lay_out(parameters, owners, hosts_, gathering.units, gathering.most);
  Memory memory = share_memory(layout.bytes, layout.at_most, hosts_, group, world);
  std::vector<size_t> unit_of(parameters.size());
  for (size_t u = 0; u < gathering.units.size(); ++u)
    for (const size_t i : gathering.units[u]) unit_of[i] = u;
  if (!gathering.units.empty()) gatherer_ = make_gatherer(layout, gathering, memory, hosts_, group);
  memory_ = std::move(memory.own);

  // One after the other, so that a parameter's private memory is free before the next one's shared memory is taken.
  const at::NoGradGuard no_grad;
  std::exception_ptr failure;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    Entry& entry = entries_.emplace_back(Entry{.name = name, .tensor = tensor, .owner = owners[i]});
    const bool is_on_each_host = owners[i].host == kEachHost;
    parallel::Sharing sharing{.name = name,
                              .owner = group.global_rank(fsdp::rank_of(owners[i], hosts_, group.rank())),
                              .is_own = is_mine(entry),
                              .first_owner = group.global_rank(fsdp::rank_of(owners[i], hosts_, hosts_.ranks[0][0])),
                              .is_only_owner = !is_on_each_host || hosts_.ranks.size() == 1};
    if (gatherer_)
      gather_before_use(sharing, gatherer_, unit_of[i], owners[i].host == static_cast<int>(hosts_.own), name);
    const auto keeper = static_cast<size_t>(hosts_.owner(owners[i].place));
    entry.shared = parallel::shared_tensor(memory.mapped[keeper], layout.offsets[i], tensor, std::move(sharing));
    if (is_mine(entry) && tensor.numel() > 0 && !failure) try {
        shm::commit(memory_.get(), layout.offsets[i], room_for(tensor));
        fill(parameters[i], entry.shared);
      } catch (...) {
        failure = std::current_exception();
      }
    if (tensor.is_meta()) continue;  // as long as it may stay without values
    use_shared_memory(entry);
    remember(entry);
  }
  release_free_memory();  // the module's own copies
  // All owners have written.
  throw_if_any_failed(failure, group);
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_meta()) continue;
    use_shared_memory(entry);
    remember(entry);
  }
}

void SharedParameters::use_shared_memory(Entry& entry) const {
  parallel::give_values(entry.tensor, entry.shared);
  if (gatherer_) parallel::watch(entry.tensor);
}

void SharedParameters::remember(Entry& entry) const {
  entry.version = entry.tensor._version();
  if (is_mine(entry)) entry.sample = sample_of(entry.shared);
}

SharedParameters::Changes SharedParameters::changes() const {
  const at::NoGradGuard no_grad;
  Changes changes;
  const int rank = group_.rank();
  for (const Entry& entry : entries_) {
    Change change = Change::kNone;
    const at::Tensor &tensor = entry.tensor, &shared = entry.shared;
    const bool is_written = tensor._version() != entry.version, mine = is_mine(entry);
    uint64_t sample = entry.sample;
    if (tensor.sizes() != shared.sizes() || tensor.scalar_type() != shared.scalar_type() ||
        tensor.device() != shared.device() || tensor.layout() != shared.layout()) {
      change = Change::kReshaped;
    } else if (!tensor.is_alias_of(shared)) {
      change = mine ? Change::kReplaced : Change::kReplacedElsewhere;
      if (mine) sample = sample_of(at::empty_like(shared).copy_(tensor));
    } else {
      if (mine) sample = sample_of(tensor);
      if (is_written && !mine)
        change = Change::kForeign;
      else if (reading_ && (is_written || (mine && sample != entry.sample)))
        change = Change::kUpdatedWhileRead;
      else if (is_written)
        change = Change::kUpdated;
    }
    changes.worst.push_back(packed(change, rank));
    const auto value = static_cast<int64_t>(sample >> (64 - kSampleBits));
    changes.largest.push_back(mine ? packed(value, rank) : -1);
    changes.smallest.push_back(mine ? packed(kLargestSample - value, rank) : -1);
  }
  return changes;
}

void SharedParameters::before_forward(Changes changes) {
  std::vector<int64_t> all;
  for (const auto* const part : {&changes.worst, &changes.largest, &changes.smallest})
    all.insert(all.end(), part->begin(), part->end());
  all_reduce(at::from_blob(all.data(), {static_cast<int64_t>(all.size())}, at::kLong),
             {.op = ReduceOp::MAX, .group = group_});
  const auto count = static_cast<std::ptrdiff_t>(entries_.size());
  changes.worst.assign(all.begin(), all.begin() + count);
  changes.largest.assign(all.begin() + count, all.begin() + 2 * count);
  changes.smallest.assign(all.begin() + 2 * count, all.end());
  reads_are_over();
  throw_if_wrong(changes);
  throw_if_hosts_differ(changes);

  const at::NoGradGuard no_grad;
  bool any_replaced = false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const Change change = change_of(changes.worst[i]);
    if (change == Change::kReplaced && is_mine(entry)) entry.shared.copy_(entry.tensor);
    if (change == Change::kUpdated && !is_mine(entry)) torch::autograd::impl::bump_version(entry.tensor);
    any_replaced |= change == Change::kReplaced;
  }
  if (any_replaced) barrier({.group = group_});
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_alias_of(entry.shared)) use_shared_memory(entry);
    remember(entry);
  }
  reading_ = true;
  if (gatherer_) gatherer_->begin();
}

// All ranks throw the same, and have forgotten the change.
void SharedParameters::throw_if_wrong(const Changes& of_all) {
  const int64_t none = packed(Change::kNone, 0);
  int64_t worst = none;
  size_t index = 0;
  for (size_t i = 0; i < entries_.size(); ++i)
    if (!is_good(change_of(of_all.worst[i])) && finding_of(of_all.worst[i]) > finding_of(worst)) {
      worst = of_all.worst[i];
      index = i;
    }
  if (worst == none) return;
  for (Entry& each : entries_) remember(each);
  const Change change = change_of(worst);
  const Entry& entry = entries_[index];
  const int changer = rank_of(worst);
  const std::string rank = text("rank ", group_.global_rank(changer)), name = text("parameter ", entry.name),
                    owner = text("rank ", group_.global_rank(fsdp::rank_of(entry.owner, hosts_, changer)));
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

// All ranks throw the same, in every forward() until the values are equal again.
void SharedParameters::throw_if_hosts_differ(const Changes& of_all) const {
  for (size_t i = 0; i < entries_.size(); ++i) {
    const int64_t largest = finding_of(of_all.largest[i]);
    const int64_t smallest = kLargestSample - finding_of(of_all.smallest[i]);
    if (largest == smallest) continue;
    throw InvalidArgument(text("parameter ", entries_[i].name, " has other values on the host of rank ",
                               group_.global_rank(rank_of(of_all.largest[i])), " than on that of rank ",
                               group_.global_rank(rank_of(of_all.smallest[i]))),
                          "Change parameters on every host alike: step(), load() and all else");
  }
}

bool SharedParameters::may_go_on(const Changes& changes) const {
  if (!reading_) return false;
  for (size_t i = 0; i < entries_.size(); ++i)
    if (change_of(changes.worst[i]) != Change::kNone)
      throw InvalidArgument(text("this rank changed parameter ", entries_[i].name, kWhileRead), kSynchronize);
  return true;
}

void SharedParameters::reads_are_over() {
  reading_ = false;
  if (gatherer_) gatherer_->end();
}

void SharedParameters::synchronize() {
  barrier({.group = group_});
  reads_are_over();
}

void SharedParameters::gather() {
  synchronize();
  if (gatherer_) gatherer_->gather_all();
}

}  // namespace muster::fsdp
