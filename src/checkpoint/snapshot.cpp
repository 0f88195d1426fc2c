#include "muster/checkpoint/snapshot.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "checkpoint/container.h"
#include "checkpoint/restore.h"
#include "checkpoint/save.h"
#include "checkpoint/snapshot_place.h"
#include "muster/base/error.h"
#include "muster/checkpoint/stop_signal.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "parallel/kit/hosts.h"

namespace muster {

struct Snapshot::Impl {
  SnapshotOptions options;
  checkpoint::SnapshotPlace place;
  std::optional<checkpoint::SnapshotPlace> of_hosts;  // .local
  checkpoint::Items items;
  std::optional<StopSignal> signal;
  std::atomic<bool> asked{false};
  std::optional<double> score;                       // of the next snapshot in .folder
  std::optional<int64_t> newest;                     // the step of the newest snapshot that is known to be intact
  at::Tensor agreement = at::empty({3}, at::kLong);  // whether to stop, the steps, and the steps negated

  explicit Impl(SnapshotOptions given);
  // per_rank: none if the item chooses (Item::what_is_equal()).
  void add(std::string name, std::optional<bool> per_rank, std::unique_ptr<checkpoint::Item> item);
  bool stop() const noexcept { return asked || (signal && signal->requested()); }
  bool any_rank_stops(int64_t steps);

  // Writing in a thread of its own. The thread has a group of its own, so that its collectives and the training's may
  // come in any order.
  struct Writing {
    int64_t steps;
    bool is_local;
    checkpoint::SaveOptions with;
    checkpoint::SnapshotPlace place;  // a copy
    checkpoint::Collected collected;
    checkpoint::Problem problem;
    std::exception_ptr failure;  // of a collective
    std::thread thread;
  };
  std::unique_ptr<Writing> writing;
  std::optional<Group> group_of_writing;
  checkpoint::Copies copies;

  // `is_local`: in the hosts' own folders.
  checkpoint::SnapshotPlace& where(bool is_local) { return is_local ? *of_hosts : place; }
  bool is_sharded(bool is_local) const { return is_local || options.sharded; }
  checkpoint::SaveOptions save_options(int64_t steps, bool is_local) {
    if (is_local) return {.steps = steps, .sharded = true, .keep = options.local.keep, .training = options.training};
    return {.steps = steps,
            .sharded = options.sharded,
            .keep = options.keep,
            .keep_best = options.keep_best,
            .score = std::exchange(score, std::nullopt),
            .training = options.training};
  }
  checkpoint::Problem save(int64_t steps, bool is_local = false);
  void begin_to_write(int64_t steps, bool is_local = false);
  checkpoint::Problem end_writing();
  void end_and_report() noexcept;
  void note(const checkpoint::SaveOptions& with, bool is_local, const checkpoint::Problem& problem);
  void report(int64_t steps, const checkpoint::Problem& problem) const;
  ~Impl();
};

namespace {

SnapshotOptions checked(SnapshotOptions options) {
  if (options.folder.empty()) throw InvalidArgument("a snapshot needs a folder", "Set .folder");
  if (options.every < 0)
    throw InvalidArgument(text("a snapshot's .every: expected 0 or more, got ", options.every),
                          "Use 1 or more, or 0 for none");
  if (!options.shard_folders.empty() && !options.sharded)
    throw InvalidArgument("a snapshot's .shard_folders are for the ranks' files", "Set .sharded, too");
  for (const auto& other : options.shard_folders)
    if (other.empty()) throw InvalidArgument("a snapshot's .shard_folders has an empty name", "Leave it out");
  if (options.keep < 1) throw InvalidArgument(text("a snapshot's .keep: expected 1 or more, got ", options.keep));
  if (options.keep_best < 0)
    throw InvalidArgument(text("a snapshot's .keep_best: expected 0 or more, got ", options.keep_best));
  const auto& local = options.local;
  if (local.folder.empty() && local.every != 0)
    throw InvalidArgument("a snapshot's .local.every needs a folder", "Set .local.folder");
  if (!local.folder.empty() && local.every < 1)
    throw InvalidArgument(text("a snapshot's .local.every: expected 1 or more, got ", local.every));
  if (local.keep < 1) throw InvalidArgument(text("a snapshot's .local.keep: expected 1 or more, got ", local.keep));
  if (local.replicas < 0)
    throw InvalidArgument(text("a snapshot's .local.replicas: expected 0 or more, got ", local.replicas));
  options.group = options.group.resolved();
  if (!options.group.is_member())
    throw InvalidArgument("this rank is not in the snapshot's group", "Make the Snapshot on the group's ranks only");
  return options;
}

}  // namespace

Snapshot::Impl::Impl(SnapshotOptions given)
    : options(checked(std::move(given))),
      place{.folder = checkpoint::Folder(options.folder),
            .collective = {.group = options.group, .timeout = options.timeout},
            .rank = options.group.rank(),
            .size = options.group.size(),
            .shard_folders = options.shard_folders} {
  if (!options.local.folder.empty()) {
    of_hosts = place;
    of_hosts->folder = checkpoint::Folder(options.local.folder);
    of_hosts->shard_folders.clear();
    std::error_code ignored;
    if (std::filesystem::equivalent(options.folder, options.local.folder, ignored))
      throw InvalidArgument("a snapshot's .folder and .local.folder are the same", "Name two");
    of_hosts->remover = std::make_shared<checkpoint::Remover>();
    of_hosts->hosts = parallel::hosts_of(options.group, World::current()).ranks;
    of_hosts->replicas = options.local.replicas;
  }
  if (options.on_sigterm) signal.emplace();
  if (options.default_generator)
    add(checkpoint::kDefaultGenerator, true, checkpoint::make_item(at::detail::getDefaultCPUGenerator()));
}

void Snapshot::Impl::add(std::string name, std::optional<bool> per_rank, std::unique_ptr<checkpoint::Item> item) {
  if (name.empty() || name.find('/') != std::string::npos)
    throw InvalidArgument(text("'", name, "' cannot name an item of a snapshot"), "Use a name without a slash");
  for (const auto& other : items)
    if (other.name == name)
      throw InvalidArgument(text("the snapshot has a '", name, "' already"), "Give each item its own name");
  items.push_back({.name = std::move(name), .wanted = per_rank, .item = std::move(item)});
}

// One all_reduce answers both questions: has any rank been asked to stop, and are all ranks at the same step?
bool Snapshot::Impl::any_rank_stops(int64_t steps) {
  if (place.size == 1) return stop();
  auto* const values = agreement.mutable_data_ptr<int64_t>();
  values[0] = stop();
  values[1] = steps;
  values[2] = -steps;
  all_reduce(agreement, {.op = ReduceOp::MAX, .group = place.collective.group});
  if (values[1] != -values[2])
    throw Mismatch(text("the ranks are at different steps, from ", -values[2], " to ", values[1],
                        ", and this one (rank ", place.rank, ") is at ", steps),
                   "Call step() with the same number on all ranks");
  return values[0] != 0;
}

void Snapshot::Impl::note(const checkpoint::SaveOptions& with, bool is_local, const checkpoint::Problem& problem) {
  if (problem) {
    if (!score) score = with.score;  // for the next one
    return;
  }
  const int64_t steps = newest.emplace(with.steps);
  where(is_local).damaged.clear();
  where(is_local).unreadable.erase(steps);
  if (of_hosts && !is_local) checkpoint::remove_up_to(*of_hosts, steps);
}

// A periodic save has failed, and the training goes on.
void Snapshot::Impl::report(int64_t steps, const checkpoint::Problem& problem) const {
  if (place.rank != 0) return;
  MUSTER_LOG(kError) << "no snapshot of step " << steps << ": " << problem.what() << ". The training goes on; "
                     << (newest ? text("the newest snapshot is that of step ", *newest) : "there is none yet");
}

checkpoint::Problem Snapshot::Impl::save(int64_t steps, bool is_local) {
  const auto collected = checkpoint::collect(where(is_local), items, is_sharded(is_local));
  const auto with = save_options(steps, is_local);
  const auto problem = checkpoint::write(where(is_local), collected, with);
  note(with, is_local, problem);
  return problem;
}

void Snapshot::Impl::begin_to_write(int64_t steps, bool is_local) {
  World& world = World::current();
  if (!group_of_writing) group_of_writing = options.group.split(0, 0, {.name = "snapshots"});
  auto begun = std::make_unique<Writing>(
      Writing{.steps = steps, .is_local = is_local, .with = save_options(steps, is_local), .place = where(is_local)});
  begun->place.collective.group = *group_of_writing;
  checkpoint::Collected& collected = begun->collected = checkpoint::collect(begun->place, items, is_sharded(is_local));
  if (!collected.of_all && !collected.problem)
    collected.problem = checkpoint::problem_of([&] { checkpoint::take_copies(collected, copies); });
  const auto write = [its = begun.get(), &world] {
    const World::Scope scope(world);
    try {
      its->problem = checkpoint::write(its->place, its->collected, its->with);
    } catch (const std::exception&) {
      its->failure = std::current_exception();
    }
  };
  try {
    begun->thread = start_thread("muster-snapshot", write);
  } catch (const Unavailable& error) {  // the other ranks' threads wait for this rank
    MUSTER_LOG(kWarning) << "rank " << place.rank << " writes its part of the snapshot of step " << steps
                         << " before the training goes on: " << error.what();
    write();
  }
  writing = std::move(begun);
}

// Waits for the thread, if there is one. Throws what its collectives have thrown.
checkpoint::Problem Snapshot::Impl::end_writing() {
  const auto ended = std::move(writing);
  if (!ended) return {};
  if (ended->thread.joinable()) ended->thread.join();
  if (ended->failure) std::rethrow_exception(ended->failure);
  where(ended->is_local).folder = ended->place.folder;  // with its lock
  where(ended->is_local).folder_is_known |= ended->place.folder_is_known;
  note(ended->with, ended->is_local, ended->problem);
  return ended->problem;
}

// As end_writing(), but only says what went wrong.
void Snapshot::Impl::end_and_report() noexcept {
  const int64_t steps = writing ? writing->steps : 0;
  try {
    if (const auto problem = end_writing()) report(steps, problem);
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "no snapshot of step " << steps << ": " << error.what();
  }
}

Snapshot::Impl::~Impl() { end_and_report(); }

Snapshot::Snapshot(SnapshotOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Snapshot::Snapshot(Snapshot&&) noexcept = default;
Snapshot& Snapshot::operator=(Snapshot&&) noexcept = default;
Snapshot::~Snapshot() = default;

void detail::throw_empty_snapshot_item(const std::string& name) {
  throw InvalidArgument(text("'", name, "' of a snapshot is an empty pointer or optional"),
                        "Fill it before add(), or leave it out");
}

Snapshot& Snapshot::add(std::string name, torch::nn::Module& module, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(false), checkpoint::make_item(module));
  return *this;
}
Snapshot& Snapshot::add(std::string name, torch::optim::Optimizer& optimizer, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank, checkpoint::make_item(optimizer));
  return *this;
}
Snapshot& Snapshot::add(std::string name, at::Generator& generator, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(generator));
  return *this;
}
Snapshot& Snapshot::add(std::string name, at::Tensor& tensor, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(tensor));
  return *this;
}
Snapshot& Snapshot::add_number(std::string name, void* number, at::ScalarType dtype, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(number, dtype));
  return *this;
}
Snapshot& Snapshot::add(std::string name, std::string& string, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(string));
  return *this;
}
Snapshot& Snapshot::add(std::string name, std::map<std::string, int64_t>& numbers, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(numbers));
  return *this;
}
Snapshot& Snapshot::add(std::string name, std::map<std::string, double>& numbers, SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(numbers));
  return *this;
}
Snapshot& Snapshot::add_archivable(std::string name, std::function<void(torch::serialize::OutputArchive&)> save,
                                   std::function<void(torch::serialize::InputArchive&)> load,
                                   SnapshotItemOptions options) {
  impl_->add(std::move(name), options.per_rank.value_or(true), checkpoint::make_item(std::move(save), std::move(load)));
  return *this;
}

int64_t Snapshot::restore(const SnapshotRestoreOptions& options) {
  Impl& s = *impl_;
  s.end_and_report();
  const int64_t steps = checkpoint::restore(s.place, s.of_hosts ? &*s.of_hosts : nullptr, s.items, options,
                                            s.options.training, [this] { return best(); });
  if (steps > 0) s.newest = steps;
  return steps;
}

bool Snapshot::step(int64_t steps) {
  Impl& s = *impl_;
  if (steps < 1) throw InvalidArgument(text("step(): steps: expected 1 or more, got ", steps), "Count from 1");
  const bool stop = s.any_rank_stops(steps);
  const auto is_time = [&](int64_t every) { return every != 0 && steps % every == 0; };
  const bool is_local = !stop && !is_time(s.options.every);
  if (is_local && !is_time(s.options.local.every)) return false;
  const auto go_on_after = [&](int64_t of, const checkpoint::Problem& problem) {
    if (problem && !problem.is(ErrorCode::kUnavailable)) throw_problem(problem);
    if (problem) s.report(of, problem);
  };
  if (stop) s.end_and_report();
  const int64_t before = s.writing ? s.writing->steps : 0;
  go_on_after(before, s.end_writing());
  if (s.options.asynchronous && !stop) {
    s.begin_to_write(steps, is_local);
    return false;
  }
  const auto problem = s.save(steps, is_local);
  if (stop && problem) throw_problem(problem);
  go_on_after(steps, problem);
  if (stop && s.place.rank == 0) checkpoint::say_stopped(0, steps, s.options.folder);
  return stop;
}

bool Snapshot::stop_here(int64_t steps) {
  Impl& s = *impl_;
  if (steps < 0) throw InvalidArgument(text("stop_here(): steps: expected 0 or more, got ", steps), "Count from 0");
  if (!s.any_rank_stops(steps)) return false;
  s.end_and_report();
  if (steps > 0)
    if (const auto problem = s.save(steps)) throw_problem(problem);
  if (s.place.rank == 0) checkpoint::say_stopped(0, steps, s.options.folder);
  return true;
}

void Snapshot::save(int64_t steps) {
  if (steps < 1) throw InvalidArgument(text("save(): steps: expected 1 or more, got ", steps), "Count from 1");
  Impl& s = *impl_;
  s.any_rank_stops(steps);  // throws Mismatch if the ranks are at different steps
  wait();
  if (s.options.asynchronous) return s.begin_to_write(steps);
  if (const auto problem = s.save(steps)) throw_problem(problem);
}

void detail::save_in_place(Snapshot& snapshot) {
  snapshot.save(checkpoint::newest_to_replace(snapshot.impl_->place, snapshot.impl_->options.training) + 1);
}

int64_t detail::restore_only(Snapshot& snapshot, const SnapshotRestoreOptions& options) {
  snapshot.impl_->place.only_reads = true;
  return snapshot.restore(options);
}

void Snapshot::score(double value) {
  if (!std::isfinite(value))
    throw InvalidArgument(text("the score of a snapshot: expected a finite number, got ", value));
  impl_->score = value;
}

std::vector<int64_t> Snapshot::best() const {
  std::vector<std::pair<double, int64_t>> scores;
  impl_->place.remover->wait();
  for (const int64_t steps : impl_->place.folder.snapshots()) {
    try {
      if (const auto score = checkpoint::read_about(impl_->place.folder.snapshot(steps)).score)
        scores.emplace_back(-*score, steps);
    } catch (const Error&) {  // restore() says what is wrong with it
    }
  }
  std::sort(scores.begin(), scores.end());
  std::vector<int64_t> steps;
  for (const auto& [score, step] : scores) steps.push_back(step);
  return steps;
}

void Snapshot::wait() {
  if (const auto problem = impl_->end_writing()) throw_problem(problem);
}

void Snapshot::request_stop() noexcept { impl_->asked = true; }
bool Snapshot::stop_requested() const noexcept { return impl_->stop(); }

}  // namespace muster
