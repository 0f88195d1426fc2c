// What the Supervisor does for ranks in muster::elastic::run(), which stay when others are lost: elastic_words.h has
// what they say to each other.
#include <fcntl.h>
#include <signal.h>

#include <algorithm>

#include "base/pidfd.h"
#include "base/text.h"
#include "launch/kit/elastic_words.h"
#include "launch/ranks/error_file.h"
#include "launch/ranks/program.h"
#include "launch/supervisor/supervisor.h"
#include "muster/store/store.h"
#include "shm/black_box.h"

namespace muster::launch {
std::optional<std::string> Supervisor::mark_of(size_t local) const {
  return store_->local()->try_get(mark_key(static_cast<int>(local)));
}

// Whether a living rank other than `rank` is in muster::elastic::run().
bool Supervisor::others_stay(const Rank* rank) const {
  if (!store_ || body_) return false;
  for (size_t local = 0; local < ranks_->all().size(); ++local) {
    const Rank* const other = ranks_->all()[local].get();
    if (other == rank || other->ended) continue;
    const auto mark = mark_of(local);
    if (mark && mark != kDone) return true;
  }
  return false;
}

// Calls a rank away from this epoch. Returns false if the rank is done.
bool Supervisor::call(size_t local) {
  const auto mark = call_away(*store_->local(), static_cast<int>(local), epoch_);
  if (mark == kStays) ranks_->all()[local]->replaces = false;  // it has come into run() meanwhile
  return mark != kDone;
}

// Starts another process in place of a rank that failed, if all others stay. Returns whether it did. On one host only.
bool Supervisor::replace(const Rank& rank, const Failure& failure) {
  if (hosts_ || !store_ || job_.restarts >= max_restarts_ || now_.terminated || now_.killed || now_.exec_error)
    return false;
  if (ranks_->all().size() < 2) return false;  // no other rank has the state
  const auto count = ranks_->all().size();
  for (size_t local = 0; local < count; ++local) {
    const Rank* const other = ranks_->all()[local].get();
    const auto mark = mark_of(local);
    if (!mark || mark == kDone || (other != &rank && other->ended)) return false;
  }
  for (size_t local = 0; local < count; ++local)
    if (ranks_->all()[local].get() != &rank && !call(local)) return false;
  ::kill(-rank.pid, SIGKILL);  // the processes that it left running
  Rank& old = *ranks_->all()[static_cast<size_t>(rank.number)];
  for (RankStream* stream : {&old.out, &old.err}) stream->drain();
  print(text("muster: ", described(failure).cause, "muster: rank ", rank.number,
             " is started again, and the others stay (", ++job_.restarts, " of ", max_restarts_, ")\n"));
  epoch_ = job_.restarts;
  oom_ = OomWatch();
  auto environment = rank_environment();
  environment.set(kEpochVariable, text(epoch_));
  try {
    fill_place(rank.number, environment, open_null(O_RDONLY));
  } catch (const std::exception& error) {  // no more processes or descriptors: the job ends by the rank's failure
    print(text("muster: rank ", rank.number, " cannot be started again: ", error.what(), '\n'));
    return false;
  }
  give_words();
  return true;
}

// Starts a process in the place of one that has ended, into a job that goes on.
void Supervisor::fill_place(int local, Environment& environment, const UniqueFd& null) {
  const pid_t before = ranks_->all()[static_cast<size_t>(local)]->pid;
  // The mark says that the new rank has been called away from the epoch before, so it waits for the word that
  // give_words() writes. Without a mark, the job would end if another rank were lost while this one starts: replace()
  // needs the marks of all ranks.
  store_->local()->set(mark_key(local), text(epoch_ - 1));
  auto next = start_rank(local, environment, null);
  next->replaces = true;
  guardian_.forget(before);
  ranks_->replace(static_cast<size_t>(local), std::move(next));
}

// Tells all ranks here their places in epoch_.
void Supervisor::give_words() {
  for (int local = 0; local < static_cast<int>(ranks_->all().size()); ++local)
    store_->local()->set(word_key(local), to_text({.epoch = epoch_,
                                                   .rank = job_.first_rank + local,
                                                   .world_size = job_.world_size,
                                                   .local_world_size = job_.ranks,
                                                   .node = job_.node}));
}

// The job is about to end: ranks that wait for a word, or for each other on the way into an epoch, get this one.
void Supervisor::give_stop() {
  if (!store_ || body_) return;
  for (size_t local = 0; local < ranks_->all().size(); ++local)
    if (!ranks_->all()[local]->ended) store_->local()->set(word_key(static_cast<int>(local)), kStop);
}

// Whether the rank was started in place of another and is not in muster::elastic::run() yet. Such a rank has no state
// to save.
bool Supervisor::is_on_its_way(const Rank& rank) const {
  const auto& all = ranks_->all();
  for (size_t local = 0; local < all.size(); ++local)
    if (all[local].get() == &rank) return rank.replaces && store_ && called_from(mark_of(local)).has_value();
  return false;
}

// --- over several hosts ---

// Called when the epoch is over. If a rank here is in muster::elastic::run(), calls the living ranks away from this
// epoch, so that they wait for the next one. Returns whether ranks are kept for it.
bool Supervisor::keep() {
  if (!store_ || body_ || !now_.end || now_.end->last || now_.exec_error || now_.terminated || now_.killed)
    return false;
  if (!others_stay(nullptr)) return false;
  // call() changes nothing for a rank that is done: it ends by itself.
  for (size_t local = 0; local < ranks_->all().size(); ++local)
    if (!ranks_->all()[local]->ended) call(local);
  return kept_ = true;
}

// Kills the ranks that were kept. The new epoch has no place for them, because the ranks of the other hosts have all
// started again meanwhile.
void Supervisor::give_up_kept() {
  kept_ = false;
  guardian_.forget();
  ranks_->signal_groups(SIGKILL);
  ranks_ = std::make_unique<RankProcesses>();
  store_.reset();
}

// Gives the ranks that were kept their new places, and starts ranks in the places that are free.
void Supervisor::start_missing() {
  auto environment = rank_environment();
  environment.set(kEpochVariable, text(epoch_));
  const UniqueFd null = open_null(O_RDONLY);
  for (int local = 0; local < job_.ranks; ++local) {
    Rank& rank = *ranks_->all()[static_cast<size_t>(local)];
    if (!rank.ended && mark_of(static_cast<size_t>(local)) == kDone) {  // it enters no further epoch
      ::kill(-rank.pid, SIGKILL);
      rank.ended = await_end(rank.pidfd, Deadline::after(kDeathTakes));
    }
    if (!rank.ended) {
      renumber(rank, job_.first_rank + local);
      continue;
    }
    ::kill(-rank.pid, SIGKILL);  // the processes that it left running
    for (RankStream* stream : {&rank.out, &rank.err}) stream->drain();
    fill_place(local, environment, null);
  }
  give_words();
  kept_ = false;
}

void Supervisor::renumber(Rank& rank, int number) {
  shm::renumber_black_box(rank.black_box.get(), number, job_.world_size);
  if (rank.number == number) return;
  rank.number = number;
  for (RankStream* stream : {&rank.out, &rank.err})
    if (stream->open()) stream->set_prefix(prefix_for(stream->printer(), number));
  rank.out.log_to(logs_.out(number), logs_.files_only());
  rank.err.log_to(logs_.err(number), logs_.files_only());
}

// The path of the error file for a rank that is about to start. A rank that was renumbered keeps the file of its first
// number; if a living rank has the file of this number, the path gets the epoch as a suffix.
std::string Supervisor::new_error_path(int number) {
  auto path = rank_error_path(options_.error_file, number);
  const auto& others = ranks_->all();
  if (std::any_of(others.begin(), others.end(),
                  [&](const auto& other) { return !other->ended && other->error_path == path; }))
    path += text('.', epoch_);
  error_paths_.insert(path);
  clear_rank_error(path);  // which an earlier attempt may have left
  return path;
}

}  // namespace muster::launch
