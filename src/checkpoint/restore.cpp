#include "checkpoint/restore.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/problem.h"
#include "comm/api/broadcast_bytes.h"

namespace muster::checkpoint {
namespace {

struct Candidates {
  Problem problem;
  std::vector<int64_t> steps;
  MSGPACK_DEFINE(problem, steps);
};

// A file that one rank has read, before the others get it.
struct Offer {
  Problem problem;
  uint64_t bytes = 0;
  MSGPACK_DEFINE(problem, bytes);
};

// The problem of the first rank that has one.
Problem first_of(const std::vector<Problem>& problems) {
  for (const auto& problem : problems)
    if (problem) return problem;
  return {};
}

void agree(const SnapshotPlace& here, const Problem& mine) {
  if (const Problem problem = first_of(all_gather_object(mine, here.collective))) throw_problem(problem);
}

// Throws if the file, though intact, is not the one that its name says, or was written by another number of ranks.
void check_is(const About& about, int64_t steps, const SnapshotPlace& here, int rank, const std::string& file) {
  if (about.steps != steps || about.rank != rank)
    throw CorruptError(text(file, ", byte ", kPreambleBytes, ": this is the snapshot of step ", about.steps,
                            about.rank == kShared ? "" : text(" of rank ", about.rank)),
                       "Do not rename snapshots");
  if (about.world_size != here.size)
    throw InvalidArgument(text(file, " was written by ", about.world_size, " ranks, but this job has ", here.size),
                          text("Restore with ", about.world_size, " ranks"));
}

// Reads the files of one candidate that this rank needs: those with shared entries, and the one with this rank's.
class Loader {
 public:
  Loader(const SnapshotPlace& here, int64_t steps) : here_(here), steps_(steps) {}

  // Returns why the candidate is refused; the same on all ranks. Throws a problem that an older candidate would have,
  // too.
  Problem load() {
    std::optional<Container> file;
    Offer offer;
    if (here_.rank == 0) {
      const auto path = here_.folder.snapshot(steps_);
      offer.problem = problem_of([&] {
        file = Container::read(path);
        check_is(file->about(), steps_, here_, kShared, path.string());
        if (!file->about().shards.empty() && file->about().shards.size() != static_cast<size_t>(here_.size))
          throw CorruptError(text(path.string(), ", byte ", kPreambleBytes, ": the list of shards is incomplete"));
      });
      if (!offer.problem) offer.bytes = file->bytes().nbytes();
    }
    offer = broadcast_object(offer, 0, here_.collective);
    if (offer.problem) return refused_or_thrown(offer.problem);
    const auto bytes = comm::broadcast_bytes(file ? file->bytes() : at::Tensor(), static_cast<int64_t>(offer.bytes), 0,
                                             here_.collective);
    files_.push_back(Container::view(bytes, here_.folder.snapshot(steps_).string()));
    return files_[0].about().shards.empty() ? Problem() : load_shards(files_[0].about().shards);
  }

  // The entries by item, each item's in order.
  std::map<std::string, Entries> entries() const {
    std::map<std::string, Entries> items;
    for (const auto& file : files_)
      for (const auto& entry : file.entries())
        if (entry.rank == kShared || entry.rank == here_.rank) items[entry.item].push_back(entry);
    for (auto& [name, entries] : items)
      std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.order < b.order; });
    return items;
  }

 private:
  static Problem refused_or_thrown(const Problem& problem) {
    if (problem.is(ErrorCode::kCorrupt) || problem.is(ErrorCode::kUnavailable)) return problem;
    throw_problem(problem);
  }

  Problem load_shards(const std::vector<Shard>& shards) {
    const Shard& shard = shards[static_cast<size_t>(here_.rank)];
    const auto path = here_.folder.path() / shard.file;
    std::optional<Container> mine;
    Offer offer;
    offer.problem = problem_of([&] {
      if (std::filesystem::path(shard.file).filename() != shard.file)
        throw CorruptError(text(shard.file, " is not a file name"));
      mine = Container::read(path);
      check_is(mine->about(), steps_, here_, here_.rank, path.string());
      if (mine->bytes().nbytes() != shard.bytes || mine->sum() != shard.sum)
        throw CorruptError(text(path.string(), ", byte 0: this is not the shard that the snapshot was made of"));
      offer.bytes = mine->shared_bytes();
    });
    const auto offers = all_gather_object(offer, here_.collective);
    for (const auto& each : offers)
      if (each.problem) return refused_or_thrown(each.problem);
    for (int r = 0; r < here_.size; ++r) {
      const auto bytes =
          comm::broadcast_bytes(r == here_.rank ? mine->bytes() : at::Tensor(),
                                static_cast<int64_t>(offers[static_cast<size_t>(r)].bytes), r, here_.collective);
      files_.push_back(r == here_.rank ? std::move(*mine) : Container::view(bytes, text("rank ", r, "'s shard")));
    }
    return {};
  }

  const SnapshotPlace& here_;
  int64_t steps_;
  std::vector<Container> files_;
};

// The entries of each item. Throws InvalidArgument if the snapshot has other items, or entries that an item cannot
// accept.
std::vector<Entries> matched(const Items& items, std::map<std::string, Entries> saved) {
  std::vector<Entries> all;
  for (const auto& [name, per_rank, item] : items) {
    auto found = saved.extract(name);
    if (!found && !item->save().empty())
      throw InvalidArgument(text("the snapshot has no '", name, "'"),
                            "Restore with the program that saved, or name another folder");
    Entries& entries = all.emplace_back();
    if (!found) continue;  // a module without parameters and buffers
    entries = std::move(found.mapped());
    if ((entries.front().rank != kShared) != per_rank)
      throw InvalidArgument(
          text("'", name, "' is ", per_rank ? "shared" : "per rank", " in the snapshot, and not here"),
          "Pass add() the same .per_rank as when the snapshot was saved");
    item->check(entries);
  }
  if (!saved.empty())
    throw InvalidArgument(text("the snapshot has a '", saved.begin()->first, "' that was not added"),
                          "Add it, or name another folder");
  return all;
}

void apply(const SnapshotPlace& here, const Items& items, std::map<std::string, Entries> saved) {
  std::vector<Entries> entries;
  agree(here, problem_of([&] { entries = matched(items, std::move(saved)); }));
  Problem problem;
  for (const bool refusing : {true, false}) {
    for (size_t i = 0; i < items.size() && !problem; ++i) {
      if (items[i].item->may_refuse() != refusing) continue;
      problem = problem_of([&] { items[i].item->load(entries[i]); });
      if (problem)
        problem.message = text("'", items[i].name, "' cannot load its part of the snapshot: ", problem.message);
    }
  }
  agree(here, problem);
}

}  // namespace

Restored restore(SnapshotPlace& here, const Items& items) {
  Candidates candidates;
  if (here.rank == 0) {
    candidates.problem = problem_of([&] {
      here.folder.claim();
      candidates.steps = here.folder.snapshots();
    });
  }
  candidates = broadcast_object(candidates, 0, here.collective);
  if (candidates.problem) throw_problem(candidates.problem);

  Restored restored;
  std::vector<std::string> why;
  for (const int64_t steps : candidates.steps) {
    Loader loader(here, steps);
    if (const Problem problem = loader.load()) {
      if (here.rank == 0) {
        MUSTER_LOG(kWarning) << "the snapshot of step " << steps << " is refused: " << problem.what();
      }
      why.push_back(problem.message);
      restored.refused.insert(steps);
      continue;
    }
    apply(here, items, loader.entries());
    restored.steps = steps;
    break;
  }
  if (restored.steps == 0 && !why.empty())
    throw CorruptError(text("no snapshot in ", here.folder.path().string(), " is intact: ", join(why, "; ")),
                       "Restore one from a backup, or name another folder to begin anew");
  here.folder.remove_temporaries(here.rank, here.size);
  if (here.rank == 0 && restored.steps > 0) {
    MUSTER_LOG(kInfo) << "restored step " << restored.steps << " from " << here.folder.path().string();
  }
  return restored;
}

}  // namespace muster::checkpoint
