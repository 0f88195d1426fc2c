#include "checkpoint/reading.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/hosts.h"

namespace muster::checkpoint {
namespace {

constexpr size_t kFewFiles = 64;  // that may stay open

// A file that one rank has opened: what the others need to know of it.
struct Offer {
  Problem problem;
  std::string head;  // as Container::head()
  MSGPACK_DEFINE(problem, head);
};

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

Problem Reading::open_and_verify() {
  const auto path = here_.folder.snapshot(steps_);
  std::optional<Container> file;
  Offer offer;
  if (here_.rank == 0) {
    offer.problem = problem_of([&] {
      file = Container::open(path);
      const About& about = file->about();
      check_is(about, steps_, kShared, path.string());
      if (!about.shards.empty() && about.shards.size() != static_cast<size_t>(about.world_size))
        throw CorruptError(text(path.string(), ", byte 0: the list of shards is incomplete"));
      offer.head = file->head();
    });
  }
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

Container open_shard(const std::filesystem::path& folder, const About& manifest, size_t index) {
  const auto path = path_of_shard(folder, manifest.shards[index]);
  Container container = Container::open(path);
  check_is(container.about(), manifest.steps, static_cast<int>(index), path.string());
  const Shard& shard = manifest.shards[index];
  if (container.bytes() != shard.bytes || container.sum() != shard.sum)
    throw CorruptError(text(path.string(), ", byte 0: this is not the shard that the snapshot was made of"));
  return container;
}

Problem Reading::open_shards() {
  std::vector<Container> mine;
  std::vector<Offer> offers;
  for (auto i = static_cast<size_t>(here_.rank); i < about_.shards.size(); i += static_cast<size_t>(here_.size)) {
    Offer& offer = offers.emplace_back();
    offer.problem = problem_of([&] {
      mine.push_back(open_shard(here_.folder.path(), about_, i));
      if (about_.shards.size() > kFewFiles) mine.back().open_for_each_read();
      offer.head = mine.back().head();
    });
    if (offer.problem) break;
  }
  const auto of_ranks = all_gather_object(offers, here_.collective);
  for (const auto& each : of_ranks)
    for (const Offer& offer : each)
      if (offer.problem) return refused_or_thrown(offer.problem);
  for (size_t i = 0; i < about_.shards.size(); ++i) {
    const auto holder = static_cast<int>(i) % here_.size;
    const size_t of_holder = i / static_cast<size_t>(here_.size);
    const std::string& head = of_ranks[static_cast<size_t>(holder)][of_holder].head;
    files_.push_back({holder, holder == here_.rank ? std::move(mine[of_holder])
                                                   : Container::directory(head, about_.shards[i].file)});
  }
  return {};
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
  for (const Problem& problem : all_gather_object(found, here_.collective))
    if (problem) return refused_or_thrown(problem);
  return {};
}

}  // namespace muster::checkpoint
