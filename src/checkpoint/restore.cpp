#include "checkpoint/restore.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/text.h"
#include "checkpoint/delivery.h"
#include "checkpoint/problem.h"
#include "checkpoint/reading.h"

namespace muster::checkpoint {
namespace {

struct Listing {
  Problem problem;
  std::vector<int64_t> steps;
  MSGPACK_DEFINE(problem, steps);
};

// What a rank sees in the folder of all.
struct Newest {
  int64_t snapshot = 0, shard = 0;
  std::string folder;
  MSGPACK_DEFINE(snapshot, shard, folder);
};

// The folder may be on each host's own disk, and rank 0 on another host now. Then its snapshots are there no longer,
// and the training would begin anew. After snapshots_in(), which reports what is wrong on rank 0. Collective.
void require_rank_0s_snapshots(const SnapshotPlace& here) {
  if (here.size == 1) return;
  Newest mine{.folder = here.folder.path().string()};
  const Problem ignored = problem_of([&] {
    if (const auto steps = here.folder.snapshots(); !steps.empty()) mine.snapshot = steps.front();
    mine.shard = here.folder.newest_shard();
  });
  const auto all = all_gather_object(mine, here.collective);
  const Newest& first = all[0];
  constexpr const char* kAdvice =
      "Use a folder that all hosts share, or start the ranks on the hosts where they were (--node-rank)";
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r].snapshot > first.snapshot)
      throw InvalidArgument(
          text("rank ", r, " has a snapshot of step ", all[r].snapshot, " in its folder ", all[r].folder,
               ", and rank 0 has ", first.snapshot == 0 ? "none" : text("none newer than step ", first.snapshot)),
          kAdvice);
  for (size_t r = 1; here.rank == 0 && first.snapshot == 0 && r < all.size(); ++r) {
    if (all[r].shard <= first.shard) continue;
    MUSTER_LOG(kWarning) << "rank " << r << " has a part of a snapshot of step " << all[r].shard << " in its folder "
                         << all[r].folder
                         << ", and rank 0 has no snapshot: the training begins anew, and its first snapshot "
                         << "takes the place of that part. " << kAdvice;
    return;
  }
}

// The snapshots in a folder, or in those of the hosts. Collective.
std::set<int64_t> snapshots_in(SnapshotPlace& where) {
  Listing mine;
  if (where.leads())
    mine.problem = problem_of([&] {
      where.folder.claim(where.only_reads ? Folder::Use::kReads : Folder::Use::kSaves);
      mine.steps = where.folder.snapshots();
    });
  std::set<int64_t> all;
  for (const Listing& each : where.is_of_hosts() ? all_gather_object(mine, where.collective)
                                                 : std::vector{broadcast_object(mine, 0, where.collective)}) {
    if (each.problem) {
      Problem problem = each.problem;
      if (where.is_of_hosts()) problem.message += " (.local.folder must be each host's own)";
      throw_problem(problem);
    }
    all.insert(each.steps.begin(), each.steps.end());
  }
  return all;
}

struct Candidate {
  int64_t steps = 0;
  SnapshotPlace* where = nullptr;
};

// The newest first; of the same step, that in the folder of all.
std::vector<Candidate> candidates_in(SnapshotPlace& here, SnapshotPlace* of_hosts) {
  std::vector<Candidate> all;
  for (SnapshotPlace* const where : {&here, of_hosts}) {
    if (!where) continue;
    where->remover->wait();
    where->damaged.clear();
    where->unreadable.clear();
    const std::set<int64_t> there = snapshots_in(*where);
    if (!where->is_of_hosts()) require_rank_0s_snapshots(*where);
    for (const int64_t steps : there) all.push_back({steps, where});
  }
  std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.steps > b.steps; });
  return all;
}

// Those of the steps that the user has named, if any.
std::vector<Candidate> only(std::optional<int64_t> named, std::vector<Candidate> all, const SnapshotPlace& here) {
  if (!named) return all;
  std::set<int64_t> there;
  for (const Candidate& each : all) there.insert(each.steps);
  if (!there.contains(*named))
    throw InvalidArgument(text("there is no snapshot of step ", *named, " in ", here.folder.path().string(),
                               there.empty() ? ", which has none" : text(", which has those of ", join(there))),
                          "Name one of those, or none for the newest");
  std::erase_if(all, [&](const Candidate& each) { return each.steps != *named; });
  return all;
}

int64_t step_of_best(const SnapshotRestoreOptions& options, const SnapshotPlace& here,
                     const std::function<std::vector<int64_t>()>& best) {
  if (options.steps) throw InvalidArgument("restore() takes .steps or .best, not both");
  Listing found;
  if (here.rank == 0) found.problem = problem_of([&] { found.steps = best(); });
  found = broadcast_object(found, 0, here.collective);
  if (found.problem) throw_problem(found.problem);
  if (found.steps.empty())
    throw InvalidArgument(text("no snapshot in ", here.folder.path().string(), " has a score"),
                          "Call score() before save(), and set .keep_best");
  return found.steps[0];
}

void require_equal(const SnapshotRestoreOptions& options, const std::string& training, const SnapshotPlace& here) {
  const auto said =
      text(options.strict, ' ', options.best, ' ', options.steps ? text(*options.steps) : "newest", ' ', training);
  for (const std::string& theirs : all_gather_object(said, here.collective))
    if (theirs != said)
      throw Mismatch("the ranks call restore() with different options, or have different .training",
                     "Use the same on all ranks");
}

void require_same_training(const About& about, const std::string& training, const SnapshotPlace& where) {
  if (training.empty() || about.training.empty() || training == about.training) return;
  throw InvalidArgument(text("the snapshot of step ", about.steps, " in ", where.folder.path().string(),
                             " is of the training '", about.training, "', and this is '", training, "'"),
                        "Name a folder of its own for each training, or restore with the same .training");
}

void agree(const SnapshotPlace& here, const Problem& mine) {
  if (const Problem problem = first_of(all_gather_object(mine, here.collective))) throw_problem(problem);
}

bool any_named(const Items& items, const std::string& name) {
  return std::any_of(items.begin(), items.end(), [&](const NamedItem& item) { return item.name == name; });
}

class EndOfLoad {
 public:
  explicit EndOfLoad(const std::deque<Target>& targets) : targets_(targets) {}
  EndOfLoad(const EndOfLoad&) = delete;
  EndOfLoad& operator=(const EndOfLoad&) = delete;
  ~EndOfLoad() {
    for (const Target& target : targets_) target.item->item->end_load(is_whole);
  }
  bool is_whole = false;

 private:
  const std::deque<Target>& targets_;
};

void report_differences(const Delivery& delivery) {
  std::vector<std::string> sides;
  if (!delivery.only_here().empty())
    sides.push_back(text("only the program has, and keeps as it is, ", listed(delivery.only_here())));
  if (!delivery.only_saved().empty()) sides.push_back(text("only the snapshot has ", listed(delivery.only_saved())));
  if (sides.empty()) return;
  MUSTER_LOG(kWarning) << "a snapshot is restored in part: " << join(sides, "; ");
}

// Everything is checked before anything changes.
void apply(const SnapshotPlace& here, const Items& items, const Reading& reading, bool strict) {
  std::optional<Delivery> delivery;
  agree(here, problem_of([&] { delivery.emplace(here, reading, items, strict); }));
  const auto plans = all_gather_object(delivery->plan(), here.collective);
  if (std::any_of(plans.begin(), plans.end(), [&](uint64_t plan) { return plan != plans[0]; }))
    throw Mismatch("the ranks have added different things to the snapshot", "Add the same on all ranks");

  auto& targets = delivery->targets();
  Problem problem =
      delivery->deliver(When::kInOnePiece, [](Target& target, Entries&& entries, const std::vector<size_t>& indices) {
        for (size_t i = 0; i < entries.size(); ++i) target.entries[indices[i]] = std::move(entries[i]);
      });
  agree(here, problem);  // what comes from a rank that could not read it is not to be checked
  problem = problem_of([&] {
    for (const Target& target : targets)
      if (const Item& item = *target.item->item; !target.entries.empty())
        strict ? item.check(target.entries) : item.check_part(target.entries);
  });
  agree(here, problem);
  if (here.rank == 0) report_differences(*delivery);

  const auto load = [](Target& target, const Entries& entries, bool is_part) {
    Item& item = *target.item->item;
    Problem problem = problem_of([&] { is_part ? item.load_part(entries) : item.load(entries); });
    if (!problem) return;
    problem.message = text("'", target.item->name, "' cannot load its part of the snapshot: ", problem.message);
    throw_problem(problem);
  };
  EndOfLoad end(targets);
  for (const Refusal refusal : {Refusal::kLikely, Refusal::kUnlikely, Refusal::kNever}) {
    for (Target& target : targets) {
      const Item& item = *target.item->item;
      if (problem || target.entries.empty() || item.refusal() != refusal) continue;
      std::erase_if(target.entries, [&](const Entry& entry) { return item.comes_in_parts(entry); });
      problem = problem_of([&] { load(target, target.entries, false); });
      target.entries.clear();
    }
    agree(here, problem);
  }
  problem = delivery->deliver(When::kInParts, [&](Target& target, Entries&& entries, const std::vector<size_t>&) {
    load(target, entries, true);
  });
  agree(here, problem);
  end.is_whole = true;
}

}  // namespace

int64_t newest_to_replace(SnapshotPlace& here, const std::string& training) {
  const auto there = snapshots_in(here);
  const int64_t newest = there.empty() ? 0 : *there.rbegin();
  Problem problem;
  if (here.rank == 0)
    problem = problem_of([&] {
      // The newest one that is intact tells whose they are.
      for (auto steps = there.rbegin(); steps != there.rend(); ++steps) try {
          if (read_about(here.folder.snapshot(*steps)).training == training) break;
          throw InvalidArgument(text(here.folder.path().string(), " has the snapshots of a training"),
                                "Name another folder");
        } catch (const CorruptError&) {
          here.damaged.insert(*steps);
        }
    });
  problem = broadcast_object(problem, 0, here.collective);
  if (problem) throw_problem(problem);
  here.folder.remove_temporaries(here.cares_for(), here.size);
  here.folder_is_known = true;
  return newest;
}

int64_t restore(SnapshotPlace& here, SnapshotPlace* of_hosts, Items& items, SnapshotRestoreOptions options,
                const std::string& training, const std::function<std::vector<int64_t>()>& best) {
  require_equal(options, training, here);
  if (options.best) options.steps = step_of_best(options, here, best);
  if (const Problem problem = choose_per_rank(here, items, false)) throw_problem(problem);
  Candidate restored;
  std::vector<std::string> why;
  bool generators_stay = false;
  const auto all = candidates_in(here, of_hosts);
  for (const auto& [steps, where] : only(options.steps, all, here)) {
    Reading reading(*where, steps);
    if (const Problem problem = reading.open_and_verify()) {
      if (here.rank == 0) {
        MUSTER_LOG(kWarning) << "the snapshot of step " << steps
                             << (where->is_of_hosts() ? text(" in ", where->folder.path().string()) : "")
                             << " is refused: " << problem.what();
      }
      why.push_back(problem.message);
      (problem.is(ErrorCode::kCorrupt) ? where->damaged : where->unreadable).insert(steps);
      continue;
    }
    require_same_training(reading.about(), training, *where);
    apply(*where, items, reading, options.strict);
    generators_stay = reading.is_of_other_ranks() && any_named(items, kDefaultGenerator);
    restored = {steps, where};
    break;
  }
  if (options.steps && restored.steps == 0)
    throw CorruptError(text("the snapshot of step ", *options.steps, " is not intact: ", join(why, "; ")),
                       "Restore it from a backup, or name another one");
  if (restored.steps == 0 && !(here.damaged.empty() && here.unreadable.empty()))
    throw CorruptError(
        text("no snapshot in ", here.folder.path().string(),
             of_hosts ? text(" or ", of_hosts->folder.path().string()) : "", " is intact: ", join(why, "; ")),
        "Restore one from a backup, or name another folder to begin anew");
  if (restored.steps == 0 && !why.empty() && here.rank == 0) {
    // Hosts that were lost had parts of them, and nothing has been saved in the folder of all.
    MUSTER_LOG(kWarning) << "no snapshot of the hosts is complete, and " << here.folder.path().string()
                         << " has none: the training begins anew";
  }
  for (SnapshotPlace* const where : {&here, of_hosts}) {
    if (!where) continue;
    where->folder_is_known = true;
    where->has_newer = restored.where && restored.steps < all.front().steps && options.steps;
    if (where->only_reads) continue;
    if (!where->is_of_hosts() || where->leads()) where->folder.remove_temporaries(where->cares_for(), where->size);
  }
  if (here.rank == 0 && restored.steps > 0) {
    if (generators_stay) {
      MUSTER_LOG(kWarning) << "another number of ranks has saved step " << restored.steps
                           << ", so each rank keeps the state of its own default generator";
    }
    MUSTER_LOG(kInfo) << "restored step " << restored.steps << " from " << restored.where->folder.path().string();
  }
  return restored.steps;
}

}  // namespace muster::checkpoint
