#include "checkpoint/save.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "base/copy.h"
#include "base/log.h"
#include "base/random.h"
#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/item_values.h"
#include "checkpoint/replicas.h"
#include "checkpoint/tensor_header.h"
#include "comm/api/broadcast_bytes.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

// An entry on its way to rank 0. Bytes of a large one follow, when rank 0 writes them.
struct Packed {
  static constexpr size_t kLarge = size_t{256} << 10;  // bytes

  std::string item, name, kind;
  int rank = kShared;
  int64_t order = 0;
  at::Tensor tensor;  // of a large one: with its dtype, and without elements
  bool is_large = false;
  std::vector<int64_t> sizes;  // of a large one
  MSGPACK_DEFINE(item, name, kind, rank, order, tensor, is_large, sizes);

  static bool is_large_entry(const Entry& entry) { return entry.tensor.nbytes() >= kLarge; }
  static Packed of(const Entry& entry) {
    Packed packed{entry.item, entry.name, entry.kind, entry.rank, entry.order, entry.tensor};
    if (!is_large_entry(entry)) return packed;
    packed.is_large = true;
    packed.sizes = entry.tensor.sizes().vec();
    packed.tensor = at::empty({0}, entry.tensor.scalar_type());
    return packed;
  }
  // Of a large one, its tensor is on the device "meta".
  Entry entry() const {
    Entry all{item, name, kind, rank, order, tensor};
    if (is_large) all.tensor = at::empty(sizes, at::TensorOptions(tensor.scalar_type()).device(at::kMeta));
    return all;
  }
};

// The bytes of the other ranks' large entries, which come to rank 0 in the order of the file, so that neither needs
// memory for all of them. Whatever goes wrong, all pieces travel: the other ranks wait for them.
class Pieces {
 public:
  // On rank 0. `entries`: in the order of the file, with the rank that has each.
  Pieces(const SnapshotPlace& here, const std::vector<std::pair<Entry, int>>& entries) : here_(here) {
    for (const auto& [entry, rank] : entries)
      if (entry.tensor.is_meta()) from_.push_back({rank, static_cast<int64_t>(entry.tensor.nbytes())});
    if (!from_.empty()) memory_ = at::empty({kPiece}, at::kByte);
  }
  void fetch_next(const std::function<void(std::string_view piece)>& take) {
    const auto [rank, bytes] = from_.at(entry_);
    while (at_ < bytes) take(receive());
    ++entry_;
    at_ = 0;
  }
  void skip_rest() {
    for (; entry_ < from_.size(); ++entry_, at_ = 0)
      while (at_ < from_[entry_].bytes) receive();
  }
  // On the others.
  static void send(const SnapshotPlace& here, const Entries& own) {
    Entries in_order = own;
    put_in_files_order(in_order);
    for (const Entry& entry : in_order) {
      if (!Packed::is_large_entry(entry)) continue;
      const auto bytes = static_cast<int64_t>(entry.tensor.nbytes());
      const at::Tensor all = at::from_blob(const_cast<void*>(entry.tensor.const_data_ptr()), {bytes}, at::kByte);
      for (int64_t at = 0; at < bytes; at += kPiece)
        comm::pass_bytes(all.narrow(0, at, std::min(kPiece, bytes - at)), here.rank, 0, here.collective);
    }
  }

 private:
  static constexpr int64_t kPiece = 4 * static_cast<int64_t>(kBlockBytes);
  struct From {
    int rank;
    int64_t bytes;
  };

  std::string_view receive() {
    const auto [rank, bytes] = from_[entry_];
    const at::Tensor piece = memory_.narrow(0, 0, std::min(kPiece, bytes - at_));
    comm::pass_bytes(piece, rank, 0, here_.collective);
    at_ += piece.numel();
    return {static_cast<const char*>(piece.const_data_ptr()), static_cast<size_t>(piece.numel())};
  }

  const SnapshotPlace& here_;
  at::Tensor memory_;
  std::vector<From> from_;
  size_t entry_ = 0;
  int64_t at_ = 0;
};

// What each rank sends before rank 0 completes the snapshot.
struct Part {
  Problem problem;
  uint64_t layout = 0;          // a checksum of what must be the same on all ranks
  std::vector<Packed> entries;  // if the snapshot is one file: this rank's entries
  std::string file;             // if it is sharded: the name, size and header checksum of this rank's shard
  uint64_t bytes = 0, sum = 0;
  MSGPACK_DEFINE(problem, layout, entries, file, bytes, sum);
};

// What rank 0 sends to all ranks at the end.
struct Conclusion {
  Problem problem;
  bool in_use = false;           // in spite of the problem, a manifest may refer to the new shards
  bool known = false;            // `keep` and `keep_steps` name all shards that have to stay
  std::set<std::string> keep;    // these shards
  std::set<int64_t> keep_steps;  // and all shards of these steps
  MSGPACK_DEFINE(problem, in_use, known, keep, keep_steps);
};

bool is_per_rank(const NamedItem& item) { return item.per_rank; }
bool is_shared(const NamedItem& item) { return !item.per_rank; }
bool is_spread(const NamedItem& item) { return !item.per_rank && !item.item->spread_over().empty(); }

// What this rank has of the items that are `wanted`.
Entries entries_of(const SnapshotPlace& here, const Items& items, bool (*wanted)(const NamedItem&)) {
  const int global_rank = here.collective.group.global_rank(here.rank);
  Entries all;
  for (const auto& each : items) {
    if (!wanted(each)) continue;
    for (auto& entry : each.item->save()) {
      if (each.per_rank && entry.tensor.is_meta())
        throw InvalidArgument(text("'", each.name, "' would be stored by every rank, but none has all of it"),
                              "Add it without .per_rank: each parameter is stored once, by its owner");
      if (!each.per_rank && entry.only != kEveryRank && entry.only != global_rank) continue;
      entry.item = each.name;
      entry.rank = each.per_rank ? here.rank : kShared;
      all.push_back(std::move(entry));
    }
  }
  return all;
}

// A checksum of what must be the same on all ranks.
uint64_t layout_of(const Items& items, const Entries& shared) {
  std::string all;
  for (const auto& item : items) all += text(item.name, '\0', item.per_rank, '\n');
  for (const auto& entry : shared)
    if (entry.only == kEveryRank)
      all += text(entry.item, '/', entry.name, ' ', entry.kind, ' ', c10::toString(entry.tensor.scalar_type()), ' ',
                  join(entry.tensor.sizes()), '\n');
  return checksum(all);
}

// The rank that writes each of the shared entries; of those that one rank has, this one. The others are dealt out from
// the largest on, each to the rank that has the fewest bytes so far. Rank 0 writes all small entries, and all buffers:
// data-parallel training makes buffers equal only before a forward.
std::vector<int> deal(const Entries& shared, const SnapshotPlace& here) {
  constexpr size_t kSmall = 64 * 1024;
  std::vector<int> owners(shared.size(), 0);
  std::vector<size_t> load(static_cast<size_t>(here.size), 0), large;
  for (size_t i = 0; i < shared.size(); ++i) {
    const auto& entry = shared[i];
    if (entry.only != kEveryRank)
      owners[i] = here.rank;
    else if (entry.kind != "buffer" && entry.tensor.nbytes() >= kSmall)
      large.push_back(i);
    else
      load[0] += entry.tensor.nbytes();
  }
  std::stable_sort(large.begin(), large.end(),
                   [&](size_t a, size_t b) { return shared[a].tensor.nbytes() > shared[b].tensor.nbytes(); });
  for (const size_t i : large) {
    const auto least = std::min_element(load.begin(), load.end());
    owners[i] = static_cast<int>(least - load.begin());
    *least += shared[i].tensor.nbytes();
  }
  return owners;
}

// The problem of the first rank that has one, or else a difference between the ranks.
Problem problem_among(const std::vector<Part>& parts) {
  for (size_t r = 0; r < parts.size(); ++r)
    if (Problem problem = parts[r].problem) {
      problem.message = text("rank ", r, ": ", problem.message);
      return problem;
    }
  for (size_t r = 1; r < parts.size(); ++r)
    if (parts[r].layout != parts[0].layout)
      return {static_cast<int>(ErrorCode::kMismatch),
              text("rank ", r, " and rank 0 have added different things to the snapshot"),
              "Add the same names and shapes in the same order, and add with .per_rank what differs between ranks"};
  return {};
}

void check_folder(SnapshotPlace& here) {
  here.folder.claim();
  if (here.has_newer)
    throw InvalidArgument("there are newer snapshots than the one that was restored",
                          "Go on from an older one in a folder of its own: restore, and save by another Snapshot");
  if (here.folder_is_known) return;
  if (const auto there = here.folder.snapshots(); !there.empty())
    throw InvalidArgument(
        text(here.folder.path().string(), " has a snapshot of step ", there.front(), ", and restore() was not called"),
        "Call restore() before the training to go on from it, or name another folder");
  here.folder_is_known = true;
}

// The rank that cares for the folder calls this when the new snapshot exists. Removes old snapshots, and sets the
// shards that have to stay. Returns files that are still to be removed.
std::vector<std::filesystem::path> remove_old(const SnapshotPlace& here, const SaveOptions& options,
                                              Conclusion& conclusion) {
  std::set<int64_t> keep{options.steps};
  std::vector<std::pair<double, int64_t>> scores;  // the score negated, and the steps
  if (options.score) scores.emplace_back(-*options.score, options.steps);
  const auto all = here.folder.snapshots();
  for (const int64_t steps : all) {
    if (steps == options.steps || here.damaged.contains(steps) || here.unreadable.contains(steps)) continue;
    if (static_cast<int>(keep.size()) < options.keep) keep.insert(steps);
    if (options.keep_best == 0) continue;
    try {
      if (const auto score = read_about(here.folder.snapshot(steps)).score) scores.emplace_back(-*score, steps);
    } catch (const Error&) {  // it has none that is known
    }
  }
  std::sort(scores.begin(), scores.end());
  for (size_t i = 0; i < scores.size() && static_cast<int>(i) < options.keep_best; ++i) keep.insert(scores[i].second);
  keep.insert(here.unreadable.begin(), here.unreadable.end());
  std::vector<std::filesystem::path> old;
  for (const int64_t steps : all) {
    if (keep.contains(steps)) continue;
    if (options.sharded)
      here.folder.remove_snapshot(steps);  // a manifest goes before its shards
    else
      old.push_back(here.folder.set_aside(steps));
  }
  for (const int64_t steps : keep) {
    try {
      for (const auto& shard : read_about(here.folder.snapshot(steps)).shards) conclusion.keep.insert(shard.file);
    } catch (const Error&) {
      conclusion.keep_steps.insert(steps);  // the names of its shards are unknown
    }
  }
  return old;
}

// True if the manifest refers to this shard, or may refer to it. Call it after writing the manifest has failed: the
// rename may have succeeded before the failure.
bool may_refer_to(const std::filesystem::path& manifest, const std::string& shard) {
  bool refers = true;  // if the manifest cannot be read
  problem_of([&] {
    std::vector<Shard> shards;
    if (std::filesystem::exists(manifest)) shards = read_about(manifest).shards;
    refers = std::any_of(shards.begin(), shards.end(), [&](const Shard& other) { return other.file == shard; });
  });
  return refers;
}

// The last part of all ways to save: the rank that cares for the folder writes the file that makes this the newest
// snapshot, and removes old ones. Then the shards that no snapshot needs are removed.
Conclusion conclude(const SnapshotPlace& here, const SaveOptions& options,
                    const std::function<void(Conclusion&)>& write) {
  Conclusion conclusion;
  std::vector<std::filesystem::path> old;
  if (here.leads()) write(conclusion);
  if (here.is_of_hosts()) {
    if (auto first = first_of(all_gather_object(conclusion.problem, here.collective))) {
      if (here.leads()) here.folder.remove_snapshot(options.steps);  // a snapshot is on all hosts, or on none
      return {.problem = std::move(first)};
    }
  }
  if (here.leads() && !conclusion.problem) {
    const Problem left = problem_of([&] { old = remove_old(here, options, conclusion); });
    conclusion.known = !left;
    if (left) {
      MUSTER_LOG(kWarning) << "older snapshots stay in " << here.folder.path().string()
                           << " until the next one is saved: " << left.what();
    }
  }
  if (!here.is_of_hosts()) conclusion = broadcast_object(conclusion, 0, here.collective);
  const Problem ignored = problem_of([&] {
    if (!conclusion.known) return;
    for (auto& shard : here.folder.old_shards(here.cares_for(), here.size, conclusion.keep, conclusion.keep_steps))
      old.push_back(std::move(shard));
  });
  here.remover->remove(std::move(old));
  return conclusion;
}

void collect_whole(const SnapshotPlace& here, const Items& items, Collected& collected) {
  collected.layout = layout_of(items, {});
  collected.own = entries_of(here, items, is_per_rank);
  if (here.rank == 0) {
    collected.shared = entries_of(here, items, is_shared);
    return;
  }
  for (auto& entry : entries_of(here, items, is_spread))
    if (entry.only != kEveryRank) collected.own.push_back(std::move(entry));
}

void collect_sharded(const SnapshotPlace& here, const Items& items, Collected& collected) {
  const Entries shared = entries_of(here, items, is_shared);
  collected.layout = layout_of(items, shared);
  const auto owners = deal(shared, here);
  for (size_t i = 0; i < shared.size(); ++i)
    if (owners[i] == here.rank) collected.own.push_back(shared[i]);
  for (auto& entry : entries_of(here, items, is_per_rank)) collected.own.push_back(std::move(entry));
}

// About the file that is the snapshot for those who look into the folder.
About about_all(const SnapshotPlace& here, const SaveOptions& options) {
  return {.steps = options.steps,
          .world_size = here.size,
          .shards = {},
          .score = options.score,
          .training = options.training};
}

Problem write_whole(SnapshotPlace& here, const Collected& collected, const SaveOptions& options) {
  Part mine{.problem = collected.problem, .layout = collected.layout};
  if (!here.leads())
    for (const auto& entry : collected.own) mine.entries.push_back(Packed::of(entry));
  const auto parts = gather_object(mine, 0, here.collective);
  Problem problem;
  std::vector<std::pair<Entry, int>> all;  // with the rank that has it
  std::optional<Pieces> pieces;
  if (here.leads()) {
    here.remover->wait();  // for the disk's space
    problem = problem_among(parts);
    if (!problem)
      problem = problem_of([&] {
        check_folder(here);
        for (const Entries* const entries : {&collected.shared, &collected.own})
          for (const Entry& entry : *entries) all.emplace_back(entry, here.rank);
        for (size_t r = 0; r < parts.size(); ++r)
          for (const auto& packed : parts[r].entries) all.emplace_back(packed.entry(), static_cast<int>(r));
        std::stable_sort(all.begin(), all.end(),
                         [](const auto& a, const auto& b) { return comes_first(a.first.tensor, b.first.tensor); });
        pieces.emplace(here, all);
      });
  }
  problem = broadcast_object(problem, 0, here.collective);
  if (!problem && !here.leads()) Pieces::send(here, collected.own);
  const auto conclusion = conclude(here, options, [&](Conclusion& said) {
    said.problem = problem;
    if (said.problem) return;
    Entries entries;
    for (auto& [entry, rank] : all) entries.push_back(std::move(entry));
    said.problem = problem_of([&] {
      write_container(here.folder.snapshot(options.steps), about_all(here, options), std::move(entries),
                      [&](const Entry&, const auto& take) { pieces->fetch_next(take); });
    });
    pieces->skip_rest();
  });
  return conclusion.problem;
}

Problem write_sharded(SnapshotPlace& here, const Collected& collected, const SaveOptions& options) {
  // When all ranks have met here, no file of an earlier snapshot is still being removed.
  here.remover->wait();
  const auto mark = all_gather_object(random_hex(4), here.collective).front();
  const auto path = here.folder.shard(options.steps, here.rank, here.size, mark);
  std::vector<std::filesystem::path> written;
  std::optional<Replicas> replicas;
  Part mine{.problem = collected.problem, .layout = checksum(text(collected.layout, ' ', here.replicas))};
  if (!mine.problem)
    mine.problem = problem_of([&] {
      if (here.leads()) check_folder(here);
      replicas.emplace(here);
      auto file = path;
      if (const auto& others = here.shard_folders; !others.empty()) {
        file = Folder::link_shard(path, others[static_cast<size_t>(here.rank) % others.size()]);
        written.push_back(file);
      }
      written.push_back(path);
      const Shard shard = write_container(
          file, {.steps = options.steps, .world_size = here.size, .rank = here.rank, .shards = {}}, collected.own);
      if (file != path) sync_folder(here.folder.path());
      mine.file = shard.file;
      mine.bytes = shard.bytes;
      mine.sum = shard.sum;
    });
  const auto parts = all_gather_object(mine, here.collective);
  std::vector<Shard> shards;
  for (const auto& part : parts) shards.push_back({part.file, part.bytes, part.sum});
  Conclusion conclusion;
  conclusion.problem = problem_among(parts);
  if (!conclusion.problem && here.replicas > 0 && here.hosts.size() > 1)
    conclusion.problem = first_of(all_gather_object(replicas->send(shards, written), here.collective));
  if (!conclusion.problem) {
    conclusion = conclude(here, options, [&](Conclusion& said) {
      const auto manifest = here.folder.snapshot(options.steps);
      said.problem = problem_of([&] {
        About about = about_all(here, options);
        about.shards = shards;
        write_container(manifest, about, {});
      });
      said.in_use = said.problem && may_refer_to(manifest, mine.file);
    });
  }
  std::error_code ignored;
  if (conclusion.problem && !conclusion.in_use)  // nothing refers to them
    for (const auto& file : written) std::filesystem::remove(file, ignored);
  return conclusion.problem;
}

}  // namespace

Collected collect(const SnapshotPlace& here, Items& items, bool sharded) {
  Collected collected{.of_all = choose_per_rank(here, items, true)};
  if (collected.of_all) return collected;
  collected.of_all = problem_of([&] {
    for (const auto& item : items)
      if (is_spread(item))
        for (const int rank : item.item->spread_over()) here.place_of(rank);
  });
  if (!collected.of_all)
    collected.problem = problem_of([&] {
      (sharded ? collect_sharded : collect_whole)(here, items, collected);
      for (auto* const entries : {&collected.own, &collected.shared})
        for (Entry& entry : *entries)
          if (!entry.tensor.is_meta()) entry.tensor = on_host(entry.tensor);
    });
  return collected;
}

void take_copies(Collected& collected, Copies& copies) {
  constexpr int64_t kForAThread = int64_t{1} << 20;  // bytes
  Copies taken;
  for (auto* const entries : {&collected.own, &collected.shared})
    for (Entry& entry : *entries) {
      if (entry.tensor.is_meta()) continue;
      // A parameter and a buffer may have one name, and an item that of a rank.
      const std::string key = text(entry.kind, '/', entry.rank, '/', entry.item, '/', entry.name);
      at::Tensor& copy = taken[key];
      if (const auto before = copies.find(key); before != copies.end()) copy = before->second;
      const bool fits =
          copy.defined() && copy.scalar_type() == entry.tensor.scalar_type() && copy.sizes() == entry.tensor.sizes();
      if (!fits) copy = at::empty(entry.tensor.sizes(), entry.tensor.scalar_type());
      auto* const to = static_cast<char*>(copy.mutable_data_ptr());
      const auto* const from = static_cast<const char*>(entry.tensor.const_data_ptr());
      at::parallel_for(0, static_cast<int64_t>(entry.tensor.nbytes()), kForAThread, [&](int64_t begin, int64_t end) {
        copy_bytes(to + begin, from + begin, static_cast<size_t>(end - begin));
      });
      entry.tensor = copy;
    }
  copies = std::move(taken);
}

Problem write(SnapshotPlace& here, const Collected& collected, const SaveOptions& options) {
  if (collected.of_all) return collected.of_all;
  return options.sharded ? write_sharded(here, collected, options) : write_whole(here, collected, options);
}

void remove_up_to(SnapshotPlace& of_hosts, int64_t steps) {
  if (!of_hosts.leads() || !of_hosts.folder_is_known) return;
  const Problem ignored = problem_of([&] {
    std::set<int64_t> keep;
    for (const int64_t each : of_hosts.folder.snapshots()) {
      if (each > steps || of_hosts.unreadable.contains(each))
        keep.insert(each);
      else
        of_hosts.folder.remove_snapshot(each);
    }
    of_hosts.remover->remove(of_hosts.folder.old_shards(Folder::kAnyRank, of_hosts.size, {}, keep));
  });
  if (ignored) {
    MUSTER_LOG(kWarning) << "older snapshots stay in " << of_hosts.folder.path().string() << ": " << ignored.what();
  }
}

void say_stopped(int rank, int64_t steps, const std::filesystem::path& folder) {
  const auto line = steps > 0
                        ? text("rank ", rank, ": saved step ", steps, " in ", folder.string(), "; run again to go on\n")
                        : text("rank ", rank, ": asked to stop before the first step; there is nothing to save\n");
  // Nothing can be done about a failed write to standard error.
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace muster::checkpoint
