#include "launch/ranks/outcome.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "base/text.h"
#include "launch/kit/symbols.h"
#include "launch/kit/text_table.h"

namespace muster::launch {
namespace {

// Lower is more likely to be the cause.
int order(const Failure& failure) {
  if (failure.is_consequence()) return 2;
  return failure.signal != 0 ? 0 : 1;
}

// What usually causes this signal, in words; null if Muster has no explanation for it.
const char* meaning_of(int signal) {
  switch (signal) {
    case SIGKILL:
      return "the system ran out of memory (see dmesg), or somebody killed it";
    case SIGSEGV:
      return "it used memory that is not its own: a bad pointer or index, or too deep a recursion";
    case SIGBUS:
      return "it used memory that cannot be there: a truncated mapped file, or /dev/shm or huge pages are full";
    case SIGABRT:
      return "it ended itself: an uncaught exception, a failed assertion, or a corrupted heap";
    case SIGFPE:
      return "an arithmetic error, such as a whole number divided by zero";
    case SIGILL:
      return "an instruction that this processor lacks; was it built for another machine?";
    case SIGTRAP:
      return "a breakpoint or failed check outside a debugger";
    case SIGSYS:
      return "a system call that a sandbox forbids";
    case SIGPIPE:
      return "it wrote to a pipe or socket whose reader went away";
    case SIGXCPU:
      return "it used more processor time than its limit (ulimit -t)";
    case SIGXFSZ:
      return "it wrote a larger file than its limit (ulimit -f)";
    case SIGTERM:
    case SIGINT:
    case SIGHUP:
    case SIGQUIT:
      return "somebody ended this rank alone";
    default:
      return nullptr;
  }
}

std::string verdict(const Failure& failure) {
  if (failure.unknown) return "ended; its exit status was taken by another wait(2) in this process";
  if (failure.signal == 0) {
    // What shells and our own ranks use by convention (sysexits aside).
    const char* meaning = failure.exit_status == 127 ? ": a shell's word for a command that it did not find" : "";
    return text("exited with status ", failure.exit_status, meaning);
  }
  const char* meaning = failure.killer.empty() ? meaning_of(failure.signal) : failure.killer.c_str();
  return text("killed by ", name_of_signal(failure.signal), failure.dumped_core ? ", core dumped" : "",
              meaning ? ": " : "", meaning ? meaning : "");
}

}  // namespace

bool Failure::is_consequence() const {
  const auto& type = last_lines->exception_type();
  const auto& words = last_lines->exception_text();
  const bool no_store =
      type == "muster::Unavailable" && words.starts_with("the store ") && words.find(" went away") != std::string::npos;
  // This rank lost a peer, but could not find out which one, because the store did not answer.
  const bool no_names = type == "muster::Unavailable" && words.starts_with("the connections of group ");
  return type == "muster::PeerLost" || type == "muster::Aborted" || no_store || no_names;
}

const Failure& choose_cause(const std::vector<Failure>& failures, std::chrono::nanoseconds settle,
                            std::chrono::nanoseconds echo) {
  const auto until = [&](Clock::time_point when) {
    return std::find_if(failures.begin(), failures.end(), [&](const Failure& failure) { return failure.when > when; });
  };
  const auto end = until(failures[0].when + echo);
  const auto first =
      std::find_if(failures.begin(), end, [](const Failure& failure) { return !failure.is_consequence(); });
  return *std::min_element(failures.begin(), until((first != end ? first->when : failures[0].when) + settle),
                           [](const Failure& a, const Failure& b) { return order(a) < order(b); });
}

std::string name_of_signal(int signal) {
  if (const char* name = ::sigabbrev_np(signal)) return text("SIG", name, " (", signal, ')');
  return text("signal ", signal);
}

std::string end_of(const Failure& failure) {
  if (failure.unknown) return "ended";
  return failure.signal != 0 ? text("killed by ", name_of_signal(failure.signal))
                             : text("exited with status ", failure.exit_status);
}

Outcome describe(const Failure& cause, std::vector<std::string> operations) {
  Outcome outcome;
  outcome.first_failed_rank = cause.rank;
  outcome.pid = cause.pid;
  outcome.signal = cause.signal;
  outcome.status = cause.unknown ? 1 : cause.signal != 0 ? 128 + cause.signal : cause.exit_status;
  const auto& tail = *cause.last_lines;
  outcome.exception_type = tail.exception_type();
  outcome.exception_text = tail.exception_text();
  outcome.last_lines.assign(tail.lines().begin(), tail.lines().end());

  outcome.cause = text("rank ", cause.rank, " (pid ", cause.pid, ") ", verdict(cause), '\n');
  if (!outcome.exception_type.empty())
    outcome.cause += text("  exception ", printable(outcome.exception_type), outcome.exception_text.empty() ? "" : ": ",
                          printable(outcome.exception_text), '\n');
  if (!cause.error.empty()) outcome.cause += text("  error ", printable(cause.error), '\n');
  if (!tail.fault().empty()) {
    std::vector<StackFrame> frames;
    for (const auto& frame : tail.stack()) frames.push_back(parse_stack_frame(frame));
    outcome.stack = name_frames(frames);
    outcome.cause += text("  ", printable(tail.fault()), frames.empty() ? "" : "; its stack:", '\n');
    for (const auto& frame : outcome.stack) outcome.cause += text("  | ", printable(frame), '\n');
  }
  if (!operations.empty()) outcome.cause += "  its last operations:\n";
  for (const auto& operation : operations) outcome.cause += text("  | ", printable(operation), '\n');
  outcome.last_operations = std::move(operations);
  if (!outcome.last_lines.empty()) outcome.cause += "  its last lines on standard error:\n";
  for (const auto& line : outcome.last_lines) outcome.cause += text("  | ", printable(line), '\n');
  return outcome;
}

Outcome describe_stop(int signal) {
  Outcome outcome;
  outcome.status = 128 + signal;
  outcome.signal = signal;
  outcome.cause = text("the job was ended by ", name_of_signal(signal), '\n');
  return outcome;
}

}  // namespace muster::launch
