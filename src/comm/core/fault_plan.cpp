#include "muster/comm/fault_plan.h"

#include <charconv>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

[[noreturn]] void bad(std::string_view piece) {
  throw InvalidArgument(text("a fault: expected action:key=value,…, got '", piece, "'"),
                        "The actions are kill, stop, delay and corrupt; the keys are rank, operation, phase (start, "
                        "posted, middle, end), "
                        "ms and group. Separate several faults by ';'");
}

std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const auto piece = rest.substr(0, end);
  rest = end == rest.npos ? std::string_view{} : rest.substr(end + 1);
  return piece;
}

template <typename T>
T number(std::string_view piece, std::string_view value) {
  T result{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
  if (error != std::errc() || end != value.data() + value.size()) bad(piece);
  return result;
}

Fault parse_fault(std::string_view piece) {
  std::string_view rest = piece;
  const auto action = take_until(rest, ':');
  if (piece.find(':') == piece.npos) bad(piece);
  Fault fault;
  if (action == "kill")
    fault.action = FaultAction::kKill;
  else if (action == "stop")
    fault.action = FaultAction::kStop;
  else if (action == "delay")
    fault.action = FaultAction::kDelay;
  else if (action == "corrupt")
    fault.action = FaultAction::kCorrupt;
  else
    bad(piece);
  while (!rest.empty()) {
    std::string_view value = take_until(rest, ',');
    const auto key = take_until(value, '=');
    if (key == "rank")
      fault.rank = number<int>(piece, value);
    else if (key == "operation")
      fault.operation = number<uint64_t>(piece, value);
    else if (key == "ms")
      fault.delay = std::chrono::milliseconds(number<int64_t>(piece, value));
    else if (key == "group")
      fault.group = value;
    else if (key == "phase" && value == "start")
      fault.phase = FaultPhase::kStart;
    else if (key == "phase" && value == "posted")
      fault.phase = FaultPhase::kPosted;
    else if (key == "phase" && value == "middle")
      fault.phase = FaultPhase::kMiddle;
    else if (key == "phase" && value == "end")
      fault.phase = FaultPhase::kEnd;
    else
      bad(piece);
  }
  return fault;
}

}  // namespace

FaultPlan FaultPlan::parse(std::string_view text) {
  FaultPlan plan;
  while (!text.empty())
    if (const auto piece = take_until(text, ';'); !piece.empty()) plan.add(parse_fault(piece));
  return plan;
}

}  // namespace muster
