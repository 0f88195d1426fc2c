// How a job ended: the cause in words, the status, and the files that the user asked for.
#include <signal.h>

#include <algorithm>
#include <system_error>

#include "base/text.h"
#include "launch/black_box/black_box_report.h"
#include "launch/kit/text_table.h"
#include "launch/ranks/error_file.h"
#include "launch/supervisor/supervisor.h"
#include "muster/base/error.h"
#include "shm/black_box.h"
#include "store/address/host_address.h"

namespace muster::launch {
namespace {

constexpr size_t kLastOperations = 3;  // of the failing rank, in the report

}  // namespace

// The last operations of a failing rank, as of its end; empty if it had no World.
std::vector<std::string> Supervisor::operations_of(const Failure& failure) const {
  const auto& all = ranks_->all();  // perhaps with other numbers than when it failed
  const auto found = std::find_if(all.begin(), all.end(), [&](const auto& rank) { return rank->pid == failure.pid; });
  if (found == all.end()) return {};
  const auto& rank = **found;
  const auto when = static_cast<uint64_t>(failure.when.time_since_epoch() / std::chrono::nanoseconds(1));
  try {
    return last_operations(shm::read_black_box(rank.black_box.get()), when, kLastOperations);
  } catch (const Error& error) {  // the rank may have damaged its own memory; its end is reported anyway
    return {error.message()};
  }
}

// Writes the black boxes to the file that the user asked for. Returns what to tell the user: where they are, or why
// there are none; empty if the user named no file.
std::string Supervisor::save_black_boxes() const {
  if (options_.black_box_file.empty()) return {};
  std::vector<SavedBox> boxes;
  for (const auto& rank : ranks_->all())
    boxes.push_back({rank->black_box.get(), rank->end.empty() ? "does not end" : rank->end});
  try {
    write_black_boxes(options_.black_box_file, boxes);
    return text("what the ranks did last: muster blackbox ", options_.black_box_file);
  } catch (const Error& error) {
    return error.message();
  }
}

// Writes the cause to the error file that the user asked for, or clears that file if the job succeeded. Returns why the
// file could not be written; otherwise empty.
std::string Supervisor::save_error(const Outcome& outcome) const {
  if (options_.error_file.empty()) return {};
  if (outcome.status == 0) {
    clear_error_file(options_.error_file, error_paths_);
    return {};
  }
  try {
    std::string own;
    for (const auto& rank : ranks_->all())
      if (rank->number == outcome.first_failed_rank && rank->pid == outcome.pid && outcome.host == store::host_name())
        own = rank->error_path;
    write_error_file(options_.error_file, outcome, job_.id, own, error_paths_);
    return {};
  } catch (const Error& error) {
    return error.message();
  }
}

// A failure in words, with what others know of it: the kernel, the rank's own error file, its black box.
Outcome Supervisor::described(Failure failure) const {
  if (failure.signal == SIGKILL) failure.killer = oom_.about(failure.pid).words;
  for (const auto& rank : ranks_->all())
    if (rank->pid == failure.pid && !rank->error_path.empty())
      failure.error = rank_error(rank->error_path).value_or("");
  Outcome outcome = describe(failure, operations_of(failure));
  outcome.host = store::host_name();
  return outcome;
}

// The end that another host has reported, or that was reported of this one.
Outcome Supervisor::cause_elsewhere() const {
  const EpochEnd& end = *now_.end;
  Outcome outcome;
  outcome.status = end.status;
  take_rank_that_failed(end.rank, outcome);
  const std::string host = outcome.host.empty() ? "" : text(" ('", printable(outcome.host), "')");
  outcome.cause = end.kind == EpochEnd::Kind::kFailed || end.kind == EpochEnd::Kind::kStopped
                      ? text("on node ", end.node, host, ": ", printable_lines(end.cause))
                      : text(printable_lines(end.cause), '\n');
  return outcome;
}

// Why the attempt ended, or ends, as far as is known.
Outcome Supervisor::cause() const {
  const bool lost = now_.end && now_.end->kind == EpochEnd::Kind::kLost;  // also if this agent is the one that was lost
  const bool elsewhere = lost || (now_.end && now_.end->kind != EpochEnd::Kind::kDone && now_.end->node != job_.node);
  if (elsewhere && stop_signal_ == 0) return cause_elsewhere();
  if (!now_.failures.empty()) {
    const Failure& first = choose_cause(now_.failures, options_.settle, echo());
    if (!now_.hosts_error || !first.is_consequence()) {
      Outcome outcome = described(first);
      if (now_.hosts_error && job_.restarts < max_restarts_)
        outcome.cause += text("  it does not start again, since ", why_apart(), '\n');
      return outcome;
    }
  }
  // If all ranks react to the user's signal by saving their state and ending with status 0, the job has succeeded.
  const bool well = done_ || (now_.finished && all_well());
  if (now_.hosts_error && stop_signal_ == 0) {
    Outcome outcome;
    // All ranks of this host ended by themselves. As outcome() warns, the state of the other hosts' ranks is unknown.
    if (well && store_comes_again_ && !now_.terminated) return outcome;
    outcome.status = 1;
    outcome.cause = why_apart() + '\n';
    return outcome;
  }
  if (stop_signal_ != 0 && well && elsewhere && now_.end->status != 0) return cause_elsewhere();
  if (stop_signal_ == 0 || well) return {};
  Outcome outcome = describe_stop(stop_signal_);
  if (!now_.late.empty())
    outcome.cause += text("  ", now_.late, " had not ended ", options_.stop_grace.count(),
                          " ms later and was killed: what it had not saved is lost. --stop-grace gives it more time\n");
  return outcome;
}

std::string Supervisor::names_of_running() const {
  std::vector<std::string> numbers;
  for (const auto& rank : ranks_->all())
    if (!rank->ended) numbers.push_back(text("rank ", rank->number));
  static constexpr size_t kNamed = 8;
  const size_t more = numbers.size() > kNamed ? numbers.size() - kNamed : 0;
  numbers.resize(numbers.size() - more);
  return join(numbers, ", ") + (more > 0 ? text(" and ", more, " more") : "");
}

bool Supervisor::all_well() const {
  const auto& all = ranks_->all();
  return !all.empty() && std::all_of(all.begin(), all.end(), [](const auto& rank) { return rank->well; });
}

// Why the hosts' launchers have lost each other.
std::string Supervisor::why_apart() const {
  try {
    std::rethrow_exception(now_.hosts_error);
  } catch (const std::exception& error) {
    return text(meeting_ ? "the hosts do not meet: " : "the hosts cannot go on together: ", error.what());
  }
}

Outcome Supervisor::outcome() const {
  Outcome outcome = cause();
  outcome.restarts = job_.restarts;
  const auto add = [&](const std::string& line) {
    outcome.cause += line + '\n';
    if (outcome.status == 0) outcome.status = 1;
  };
  for (const auto& rank : ranks_->all())
    if (!rank->ended)
      add(text("rank ", rank->number, " (pid ", rank->pid,
               ") does not end, not even by SIGKILL: it hangs in the kernel"));
  for (const auto& sink : sinks_)
    if (sink->error() != 0 && sink->error() != EPIPE)
      add(text("some output is lost, since it cannot be written: ", std::generic_category().message(sink->error())));
  outcome.warnings += logs_.complaint();
  if (now_.hosts_error && outcome.status == 0)
    outcome.warnings += text("all ranks of this host ended well; of the others nothing is known: ", why_apart(), '\n');
  if (outcome.status != 0)
    if (const auto words = save_black_boxes(); !words.empty()) add(words);
  return outcome;
}

}  // namespace muster::launch
