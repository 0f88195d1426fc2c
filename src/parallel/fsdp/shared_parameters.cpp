#include "parallel/fsdp/shared_parameters.h"

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/fsdp/gatherer.h"
#include "parallel/kit/buckets.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::fsdp {
namespace {

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
enum class Change : int64_t {
  kNone,
  kUpdated,
  kReplacedElsewhere,
  kReplaced,
  kUpdatedWhileRead,
  kForeign,
  kReshaped,
  kUnfrozen
};
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

constexpr size_t kNowhere = ~size_t{0};

using Instead = decltype(parallel::Sharing::instead);

constexpr char kWhileRead[] =
    " after a forward() that no backward() followed, while other ranks may still have read it";
constexpr char kSynchronize[] = "Call synchronize() before such a change";
constexpr char kChangeBefore[] = "Change the module before FullyShardedDataParallel is made";

}  // namespace

// What operators use, and what they use copies of. Returns where each parameter is among the latter; kNowhere if it is
// not.
std::vector<size_t> SharedParameters::make_memory(const std::vector<parallel::NamedTensor>& parameters,
                                                  const std::vector<at::ScalarType>& compute_dtypes,
                                                  const std::vector<Owner>& owners, const World& world,
                                                  const Gathering& gathering, bool on_device) {
  std::vector<parallel::NamedTensor> used, kept;
  std::vector<size_t> kept_at(parameters.size(), kNowhere);
  std::vector<Owner> kept_owners;
  std::vector<size_t> kept_index;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const auto options = tensor.options().device(at::kMeta).requires_grad(false).dtype(compute_dtypes[i]);
    used.push_back({name, at::empty_strided(tensor.sizes(), parallel::dense_strides(tensor), options)});
    if (compute_dtypes[i] == tensor.scalar_type()) continue;
    kept_at[i] = kept.size();
    kept.push_back(parameters[i]);
    kept_owners.push_back(owners[i]);
    kept_index.push_back(i);
  }
  const auto copy_instead_of = [&](size_t i) {
    return [i, phase = phase_, dtype = parameters[i].tensor.scalar_type()](const at::Tensor& tensor) {
      return phase->instead_of(tensor, dtype, i);
    };
  };
  used_ = std::make_unique<SharedTensors>(
      used, SharedTensors::Setup{.owners = owners,
                                 .hosts = hosts_,
                                 .group = group_,
                                 .world = world,
                                 .gathering = gathering,
                                 .is_copy = [&](size_t i) { return kept_at[i] != kNowhere; },
                                 .instead = [&](size_t i) -> Instead {
                                   if (!on_device || kept_at[i] != kNowhere) return nullptr;
                                   return copy_instead_of(i);
                                 }});
  if (kept.empty()) return kept_at;
  Gathering alike{.units = std::vector<Unit>(gathering.units.size())};
  for (size_t u = 0; u < gathering.units.size(); ++u)
    for (const size_t i : gathering.units[u])
      if (kept_at[i] != kNowhere) alike.units[u].push_back(kept_at[i]);
  kept_ = std::make_unique<SharedTensors>(
      kept, SharedTensors::Setup{.owners = kept_owners,
                                 .hosts = hosts_,
                                 .group = group_,
                                 .world = world,
                                 .gathering = alike,
                                 .bytes_beside = used_->bytes_of_host(),
                                 .instead = [&](size_t k) -> Instead { return copy_instead_of(kept_index[k]); }});
  return kept_at;
}

// Before that, nobody may read a parameter.
void SharedParameters::make_copies_for_operators(const std::vector<parallel::NamedTensor>& parameters,
                                                 const std::vector<size_t>& kept_at,
                                                 const std::optional<OnDevice>& on_device) {
  if (on_device) {
    std::vector<parallel::NamedTensor> from;
    for (size_t i = 0; i < parameters.size(); ++i) from.push_back({parameters[i].name, (*used_)[i]});
    on_device_ = std::make_unique<DeviceCopies>(DeviceCopies::Setup{
        .device = on_device->device, .from = std::move(from), .units = on_device->units, .most = on_device->most});
  }
  for (size_t i = 0; i < parameters.size(); ++i)
    phase_->copies.push_back(on_device ? (*on_device_)[i] : kept_at[i] != kNowhere ? (*used_)[i] : at::Tensor());
  phase_->on_device = on_device.has_value();
}

SharedParameters::SharedParameters(const std::vector<parallel::NamedTensor>& parameters,
                                   const std::vector<at::ScalarType>& compute_dtypes, const Ownership& ownership,
                                   parallel::Hosts hosts, const Group& group, const World& world,
                                   const Gathering& gathering, const Fill& fill,
                                   const std::optional<OnDevice>& on_device)
    : group_(group), hosts_(std::move(hosts)) {
  const std::vector<Owner>& owners = ownership.owners;
  parallel::require_own_memory(parameters);
  const auto kept_at =
      make_memory(parameters, compute_dtypes, owners, world, gathering, /*on_device=*/on_device.has_value());
  make_copies_for_operators(parameters, kept_at, on_device);

  // One after the other, so that a parameter's private memory is free before the next one's shared memory is taken.
  const at::NoGradGuard no_grad;
  std::exception_ptr failure;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor] = parameters[i];
    const bool has_copy = kept_at[i] != kNowhere;
    Entry& entry = entries_.emplace_back(Entry{.name = name,
                                               .tensor = tensor,
                                               .shared = has_copy ? (*kept_)[kept_at[i]] : (*used_)[i],
                                               .copy = has_copy ? (*used_)[i] : at::Tensor(),
                                               .owner = owners[i],
                                               .is_mine = rank_of(owners[i], hosts_, group.rank()) == group.rank(),
                                               .is_trained = tensor.requires_grad(),
                                               .whole = i});
    // After a failure of `fill` for one without values, the others keep theirs: their own memory goes. If commit()
    // fails for lack of memory, values are lost.
    if (entry.is_mine && !(failure && tensor.is_meta())) try {
        used_->commit(i);
        if (has_copy) kept_->commit(kept_at[i]);
        if (tensor.numel() > 0) fill(parameters[i], entry.shared);
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
    if (tensor.is_meta()) continue;  // as long as it may stay without values
    use_shared_memory(entry);
    remember(entry);
  }
  release_free_memory();  // the module's own copies
  // All owners have written.
  parallel::throw_if_any_failed(failure, group, "could not fill its tensors");
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_meta()) continue;
    use_shared_memory(entry);
    remember(entry);
  }
  add_parts(ownership, kept_at);
  if (on_device_ && !used_->gatherer())
    for (const auto& memory : used_->mapped()) pinned_.push_back(parallel::PinnedMemory::of(memory, on_device->device));
}

void SharedParameters::add_parts(const Ownership& ownership, const std::vector<size_t>& kept_at) {
  for (size_t k = 0; k < ownership.parts.size(); ++k) {
    const RowPart& part = ownership.parts[k];
    const Owner& owner = ownership.owners_of_parts[k];
    const size_t i = part.parameter;
    Entry& whole = entries_[i];
    whole.is_in_parts = true;
    const bool has_copy = kept_at[i] != kNowhere;
    const auto rows_again = [&] {
      return has_copy ? kept_->rows(part, kept_at[i], owner) : used_->rows(part, i, owner);
    };
    const at::Tensor rows = rows_again();
    rows.set_requires_grad(true);
    parts_.push_back(rows);
    entries_.push_back({.name = part.name,
                        .tensor = rows,
                        .shared = rows_again(),
                        .copy = has_copy ? part.range.of(whole.copy) : at::Tensor(),
                        .owner = owner,
                        .is_mine = rank_of(owner, hosts_, group_.rank()) == group_.rank(),
                        .whole = i});
    remember(entries_.back());
  }
}

SharedParameters::~SharedParameters() { phase_->copies.clear(); }

void SharedParameters::for_each_gatherer(const std::function<void(Gatherer&)>& fn) const {
  for (const auto* const tensors : {used_.get(), kept_.get()})
    if (tensors && tensors->gatherer()) fn(*tensors->gatherer());
}

// When nobody reads them.
void SharedParameters::make_copies() {
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_)
    if (entry.copy.defined() && entry.is_mine && !entry.is_in_parts) entry.copy.copy_(entry.shared);
}

void SharedParameters::use_shared_memory(Entry& entry) const {
  parallel::give_values(entry.tensor, entry.shared);
  if (has_copy(entry) || parallel::is_spread(entry.shared)) parallel::watch(entry.tensor);
}

void SharedParameters::remember(Entry& entry) const {
  entry.version = entry.tensor._version();
  if (entry.is_mine && !entry.is_in_parts) entry.sample = sample_of(entry.shared);
}

SharedParameters::Changes SharedParameters::changes(bool makes_graph) const {
  const at::NoGradGuard no_grad;
  Changes changes;
  const int rank = group_.rank();
  for (const Entry& entry : entries_) {
    Change change = Change::kNone;
    const at::Tensor &tensor = entry.tensor, &shared = entry.shared;
    const bool is_written = tensor._version() != entry.version, mine = entry.is_mine;
    const bool has_sample = mine && !entry.is_in_parts;  // others may be writing to their parts
    uint64_t sample = entry.sample;
    if (tensor.sizes() != shared.sizes() || tensor.scalar_type() != shared.scalar_type() ||
        tensor.device() != shared.device() || tensor.layout() != shared.layout()) {
      change = Change::kReshaped;
    } else if (makes_graph && tensor.requires_grad() && !entry.is_trained) {
      change = Change::kUnfrozen;
    } else if (!tensor.is_alias_of(shared)) {
      // Module::to() after a forward() would get the copy's values.
      change = has_copy(entry) && phase_->reading ? Change::kUpdatedWhileRead
               : mine                             ? Change::kReplaced
                                                  : Change::kReplacedElsewhere;
      if (mine) sample = sample_of(at::empty_like(shared).copy_(tensor));
    } else {
      if (has_sample) sample = sample_of(tensor);
      if (is_written && !mine)
        change = Change::kForeign;
      else if (phase_->reading && (is_written || (has_sample && sample != entry.sample)))
        change = Change::kUpdatedWhileRead;
      else if (is_written)
        change = Change::kUpdated;
    }
    changes.worst.push_back(packed(change, rank));
    const auto value = static_cast<int64_t>(sample >> (64 - kSampleBits));
    changes.largest.push_back(has_sample ? packed(value, rank) : -1);
    changes.smallest.push_back(has_sample ? packed(kLargestSample - value, rank) : -1);
  }
  return changes;
}

void SharedParameters::before_forward(Changes changes) {
  const bool had_all = has_all();
  if (!phase_->reading && !had_all) make_copies();
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
  if (had_all) make_copies();
  bool any_is_written = had_all && kept_;
  for (size_t i = 0; i < entries_.size(); ++i) {
    Entry& entry = entries_[i];
    const Change change = change_of(changes.worst[i]);
    if (change == Change::kReplaced && entry.is_mine) {
      entry.shared.copy_(entry.tensor);
      if (entry.copy.defined()) entry.copy.copy_(entry.tensor);
    }
    if (change == Change::kUpdated && !entry.is_mine) torch::autograd::impl::bump_version(entry.tensor);
    if (change == Change::kUpdated && entry.whole != i)
      torch::autograd::impl::bump_version(entries_[entry.whole].tensor);
    any_is_written |= change == Change::kReplaced;
  }
  if (any_is_written) barrier({.group = group_});
  for (Entry& entry : entries_) {
    if (!entry.tensor.is_alias_of(entry.shared)) use_shared_memory(entry);
    remember(entry);
  }
  phase_->reading = phase_->is_step = true;
  if (used_->gatherer()) used_->gatherer()->begin();
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
    throw InvalidArgument(text(rank, " changed the shape, dtype or device of ", name), kChangeBefore);
  if (change == Change::kUnfrozen)
    throw InvalidArgument(text(name, " requires grad now on ", rank, ", but did not when it was shared"),
                          kChangeBefore);
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
    if (entries_[i].is_in_parts) continue;
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
  if (!phase_->reading) return false;
  bool any_is_replaced = false;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const Change change = change_of(changes.worst[i]);
    if (change == Change::kUnfrozen)
      throw InvalidArgument(text("parameter ", entries_[i].name, " requires grad now, but did not when it was shared"),
                            kChangeBefore);
    const bool is_replaced = change == Change::kReplaced || change == Change::kReplacedElsewhere;
    any_is_replaced |= is_replaced;
    if (change != Change::kNone && !is_replaced)
      throw InvalidArgument(text("this rank changed parameter ", entries_[i].name, kWhileRead), kSynchronize);
  }
  return !any_is_replaced;
}

// A device may still be reading what it was asked to.
void SharedParameters::own_reads_are_over() {
  if (on_device_) on_device_->forget();
}

void SharedParameters::reads_are_over() {
  phase_->reading = has_all_ = false;
  own_reads_are_over();
  for_each_gatherer([](Gatherer& gatherer) { gatherer.end(); });
}

void SharedParameters::synchronize() {
  own_reads_are_over();
  barrier({.group = group_});
  reads_are_over();
  phase_->is_step = false;
}

void SharedParameters::gather() {
  synchronize();
  make_copies();
  try {
    for_each_gatherer([](Gatherer& gatherer) { gatherer.gather_all(); });
  } catch (...) {
    reads_are_over();
    throw;
  }
  if (!used_->gatherer() && kept_) barrier({.group = group_});  // all owners have made their copies
  has_all_ = true;
}

}  // namespace muster::fsdp
