#include "checkpoint/reading.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/kit/hosts.h"

namespace muster::checkpoint {
namespace {

constexpr size_t kFewFiles = 64;  // that may stay open

// Throws if the file, though intact, is not the one that its name says.
void check_is(const About& about, int64_t steps, int rank, const std::string& file) {
  if (about.steps != steps || about.rank != rank)
    throw CorruptError(text(file, ", byte 0: this is the snapshot of step ", about.steps,
                            about.rank == kShared ? "" : text(" of rank ", about.rank)),
                       "Do not rename snapshots");
}

std::filesystem::path path_of_shard(const std::filesystem::path& folder, const Shard& shard) {
  if (std::filesystem::path(shard.file).filename() != shard.file)
    throw CorruptError(text(shard.file, " is not a file name"));
  return folder / shard.file;
}

Problem refused_or_thrown(const Problem& problem) {
  if (problem.is(ErrorCode::kCorrupt) || problem.is(ErrorCode::kUnavailable)) return problem;
  throw_problem(problem);
}

}  // namespace

// A file that one rank has opened: what the others need to know of it.
struct Reading::Offer {
  Problem problem;
  std::string head;  // as Container::head(); empty if this rank has not opened the file
  MSGPACK_DEFINE(problem, head);
};

Problem Reading::open_and_verify() {
  const auto path = here_.folder.snapshot(steps_);
  std::optional<Container> file;
  Offer offer;
  if (here_.leads()) {
    offer.problem = problem_of([&] {
      file = Container::open(path);
      const About& about = file->about();
      check_is(about, steps_, kShared, path.string());
      if (!about.shards.empty() && about.shards.size() != static_cast<size_t>(about.world_size))
        throw CorruptError(text(path.string(), ", byte 0: the list of shards is incomplete"));
      if (about.shards.empty() && here_.is_of_hosts())
        throw CorruptError(text(path.string(), ", byte 0: this is not a manifest"));
      offer.head = file->head();
    });
  }
  if (here_.is_of_hosts()) return open_one_of(all_gather_object(offer, here_.collective));
  offer = broadcast_object(offer, 0, here_.collective);
  if (offer.problem) return refused_or_thrown(offer.problem);
  if (!file) file = Container::directory(offer.head, path.string());
  about_ = file->about();
  if (about_.shards.empty())
    files_.push_back({0, std::move(*file)});
  else if (Problem problem = open_shards())
    return problem;
  open_others();
  return verify();
}

// The hosts may have manifests of several attempts to save this step: the first one counts of which all shards are
// there and intact.
Problem Reading::open_one_of(const std::vector<Offer>& manifests) {
  Problem why;
  std::set<std::string> tried;
  for (const Offer& each : manifests) {
    if (!why && each.problem) why = refused_or_thrown(each.problem);
    if (each.head.empty() || !tried.insert(each.head).second) continue;
    about_ = Container::directory(each.head, here_.folder.snapshot(steps_).string()).about();
    files_.clear();
    all_have_all_ = false;
    why = open_shards();
    if (!why) {
      open_others();
      return {};
    }
  }
  return why;
}

Container open_shard(const std::filesystem::path& folder, const About& manifest, size_t index) {
  const auto path = path_of_shard(folder, manifest.shards[index]);
  Container container = Container::open(path);
  check_is(container.about(), manifest.steps, static_cast<int>(index), path.string());
  const Shard& shard = manifest.shards[index];
  if (container.bytes() != shard.bytes || container.sum() != shard.sum)
    throw CorruptError(text(path.string(), ", byte 0: this is not the shard that the snapshot was made of"));
  return container;
}

// Opens the shards that are wanted of this rank, and returns what each rank offers of those wanted of it, by rank and
// shard.
std::vector<std::map<size_t, Reading::Offer>> Reading::offer_shards(std::vector<std::optional<Container>>& mine,
                                                                    const std::function<bool(size_t)>& wanted) const {
  std::map<size_t, Offer> offers;
  for (size_t i = 0; i < mine.size(); ++i) {
    if (!wanted(i)) continue;
    Offer& offer = offers[i];
    offer.problem = problem_of([&] {
      Container& file = mine[i].emplace(open_shard(here_.folder.path(), about_, i));
      if (mine.size() > kFewFiles) file.open_for_each_read();
      offer.head = file.head();
    });
  }
  return all_gather_object(offers, here_.collective);
}

// A shard is opened by the rank with its number, or where there are fewer ranks, by the one whose turn it is. If that
// cannot, for example because it runs on another host now, or if what it has is damaged, every rank looks for a copy.
Problem Reading::open_shards() {
  const size_t count = about_.shards.size(), size = static_cast<size_t>(here_.size);
  std::vector<std::optional<Container>> mine(count);
  std::vector<std::optional<size_t>> holders(count);
  std::vector<std::string> heads(count);
  std::vector<Problem> why(count);  // the shard has no holder
  std::vector<size_t> held(size);   // by rank: how many shards
  const auto take = [&](size_t i, size_t rank, const Offer& offer) {
    holders[i] = rank;
    heads[i] = offer.head;
    ++held[rank];
  };
  const auto offers = offer_shards(mine, [&](size_t i) { return i % size == static_cast<size_t>(here_.rank); });
  for (size_t i = 0; i < count; ++i) {
    const Offer& offer = offers[i % size].at(i);
    why[i] = offer.problem;
    if (!offer.head.empty()) take(i, i % size, offer);
  }
  std::set<std::pair<size_t, size_t>> damaged;  // shards, and the ranks whose copies are
  std::set<size_t> verified;
  std::vector<std::map<size_t, Offer>> copies;  // by rank
  for (;;) {
    if (here_.is_of_hosts())
      for (auto& [i, problem] : damaged_of(mine, holders, verified)) {
        if (here_.rank == 0) {
          MUSTER_LOG(kWarning) << "rank " << *holders[i] << " has a damaged copy of shard " << i
                               << ", so another one is looked for: " << problem.what();
        }
        damaged.emplace(i, *holders[i]);
        --held[*holders[i]];
        holders[i].reset();
        why[i] = problem;
      }
    if (std::all_of(holders.begin(), holders.end(), [](const auto& holder) { return holder.has_value(); })) break;
    if (copies.empty()) copies = offer_shards(mine, [&](size_t i) { return !holders[i]; });
    for (size_t i = 0; i < count; ++i) {
      if (holders[i]) continue;
      // Of the ranks that have it, the one that holds the fewest. Of what is wrong, rather a damage than a file that is
      // missing.
      std::optional<size_t> best;
      for (size_t rank = 0; rank < size; ++rank) {
        const Offer& offer = copies[rank].at(i);
        if (offer.problem.is(ErrorCode::kCorrupt) && !why[i].is(ErrorCode::kCorrupt)) why[i] = offer.problem;
        if (!offer.head.empty() && !damaged.contains({i, rank}) && (!best || held[rank] < held[*best])) best = rank;
      }
      if (!best) return refused_or_thrown(why[i]);
      take(i, *best, copies[*best].at(i));
    }
  }
  for (size_t i = 0; i < count; ++i) {
    const int holder = static_cast<int>(*holders[i]);
    files_.push_back(
        {holder, holder == here_.rank ? std::move(*mine[i]) : Container::directory(heads[i], about_.shards[i].file)});
  }
  return {};
}

// In folders of the hosts' own, where another host may have an intact copy: each holder verifies the shards that are
// not `verified` yet. Returns those that are damaged, the same on all ranks.
std::map<size_t, Problem> Reading::damaged_of(const std::vector<std::optional<Container>>& mine,
                                              const std::vector<std::optional<size_t>>& holders,
                                              std::set<size_t>& verified) const {
  std::map<size_t, Problem> found, all;
  for (size_t i = 0; i < holders.size(); ++i) {
    if (!holders[i] || verified.contains(i)) continue;
    if (*holders[i] == static_cast<size_t>(here_.rank))
      if (Problem problem = problem_of([&] { mine[i]->verify(); })) found.emplace(i, std::move(problem));
    verified.insert(i);
  }
  for (const auto& of_rank : all_gather_object(found, here_.collective)) all.insert(of_rank.begin(), of_rank.end());
  for (const auto& [i, problem] : all) verified.erase(i);
  return all;
}

void Reading::open_others() {
  if (here_.size == 1) return;
  std::vector<Container> others;
  std::vector<uint64_t> mine;  // the files that this rank has; empty if it does not have all
  const Problem lacks = problem_of([&] {
    if (parallel::hosts_of(here_.collective.group, World::current()).ranks.size() > 1)
      throw Unavailable("the ranks are on several hosts");
    for (size_t i = 0; i < files_.size(); ++i) {
      const Container* file = &files_[i].container;
      if (!file->is_open()) {
        others.push_back(about_.shards.empty() ? Container::open(here_.folder.snapshot(steps_))
                                               : open_shard(here_.folder.path(), about_, i));
        file = &others.back();
        if (files_.size() > kFewFiles) others.back().open_for_each_read();
      }
      mine.insert(mine.end(), {file->identity().device, file->identity().inode});
    }
  });
  if (lacks) mine.clear();
  const auto all = all_gather_object(mine, here_.collective);
  all_have_all_ = std::all_of(all.begin(), all.end(), [&](const auto& theirs) { return theirs == all[0]; });
  all_have_all_ = all_have_all_ && !all[0].empty();
  if (!all_have_all_) return;
  auto other = others.begin();
  for (File& file : files_)
    if (!file.container.is_open()) file.container = std::move(*other++);
}

Problem Reading::verify() const {
  const auto part = all_have_all_ ? static_cast<uint64_t>(here_.rank) : 0;
  const auto parts = all_have_all_ ? static_cast<uint64_t>(here_.size) : 1;
  const auto found = problem_of([&] {
    for (const File& file : files_)
      if (file.container.is_open()) file.container.verify(part, parts);
  });
  const Problem problem = first_of(all_gather_object(found, here_.collective));
  return problem ? refused_or_thrown(problem) : Problem();
}

}  // namespace muster::checkpoint
