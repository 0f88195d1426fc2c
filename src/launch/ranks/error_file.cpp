#include "launch/ranks/error_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "base/atomic_file.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "store/address/host_address.h"

namespace muster::launch {
namespace {

using nlohmann::json;

constexpr std::streamsize kMost = 1 << 20;  // bytes of a rank's own file

// null if there is no file, or if it is not JSON. Functions that write JSON call themselves for what is nested, so
// what is nested deeper than an error's is left out.
json read_rank_error(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(static_cast<size_t>(kMost), '\0');
  file.read(bytes.data(), kMost);
  bytes.resize(static_cast<size_t>(file.gcount()));
  constexpr int kDeepest = 64;
  auto document = json::parse(
      bytes, [](int depth, json::parse_event_t, json&) { return depth <= kDeepest; }, false);
  return document.is_discarded() ? json(nullptr) : document;
}

json fields_of_rank(const Outcome& outcome) {
  return {
      {"host", outcome.host.empty() ? store::host_name() : outcome.host},
      {"rank", outcome.first_failed_rank < 0 ? json(nullptr) : json(outcome.first_failed_rank)},
      {"pid", outcome.pid == 0 ? json(nullptr) : json(outcome.pid)},
      {"signal", outcome.signal == 0 ? json(nullptr) : json(outcome.signal)},
      {"exception", outcome.exception_type.empty()
                        ? json(nullptr)
                        : json{{"type", outcome.exception_type}, {"text", outcome.exception_text}}},
      {"stack", outcome.stack},
      {"last_lines", outcome.last_lines},
      {"last_operations", outcome.last_operations},
  };
}

void remove_rank_errors(const std::set<std::string>& paths) {
  for (const auto& path : paths) clear_rank_error(path);
}

}  // namespace

std::string rank_error_path(const std::string& error_file, int rank) {
  std::error_code error;  // ranks may have another working folder
  const auto whole = std::filesystem::absolute(error_file, error);
  return text(error ? error_file : whole.string(), ".rank_", rank);
}

ReportFile error_report(const std::string& error_file) { return {error_file, "{", "the job's error"}; }

ReportFile rank_error_report(const std::string& path) { return {path, "{", "a rank's error"}; }

void clear_rank_error(const std::string& path) { remove_report(rank_error_report(path)); }

void clear_error_file(const std::string& error_file, const std::set<std::string>& paths) {
  remove_report(error_report(error_file));
  remove_rank_errors(paths);
}

std::optional<std::string> rank_error(const std::string& path) {
  // {"message": {"message": "RuntimeError: …", "extraInfo": {…}}}, or {"message": "…"}
  json document = read_rank_error(path);
  for (int depth = 0; depth < 2 && document.is_object() && document.contains("message"); ++depth)
    document = json(document["message"]);
  if (!document.is_string()) return std::nullopt;
  return document.get<std::string>();
}

std::string rank_that_failed(const Outcome& outcome) {
  return outcome.first_failed_rank < 0 ? ""
                                       : fields_of_rank(outcome).dump(-1, ' ', false, json::error_handler_t::replace);
}

void take_rank_that_failed(const std::string& said, Outcome& outcome) {
  const json document = json::parse(said, nullptr, false);
  if (!document.is_object()) return;
  Outcome with = outcome;
  try {
    const auto number = [&](const char* name) -> std::optional<int> {
      const json& field = document.at(name);
      const auto value = field.is_number_integer() ? field.get<int64_t>() : -1;
      return value < 0 || value > INT32_MAX ? std::nullopt : std::optional(static_cast<int>(value));
    };
    const auto number_or = [&](const char* name, int otherwise) {
      return document.at(name).is_null() ? std::optional(otherwise) : number(name);
    };
    const auto rank = number("rank"), pid = number_or("pid", 0);  // one that could not start has none
    const auto signal = number_or("signal", with.signal);
    if (!rank || !pid || !signal) return;
    with.host = document.at("host").get<std::string>();
    with.first_failed_rank = *rank;
    with.pid = *pid;
    with.signal = *signal;
    if (const json& exception = document.at("exception"); !exception.is_null()) {
      with.exception_type = exception.at("type").get<std::string>();
      with.exception_text = exception.at("text").get<std::string>();
    }
    with.stack = document.at("stack").get<std::vector<std::string>>();
    with.last_lines = document.at("last_lines").get<std::vector<std::string>>();
    with.last_operations = document.at("last_operations").get<std::vector<std::string>>();
  } catch (const json::exception&) {
    return;  // a launcher writes other things
  }
  outcome = std::move(with);
}

void write_error_file(const std::string& error_file, const Outcome& outcome, const std::string& job,
                      const std::string& own, const std::set<std::string>& paths) {
  json document = fields_of_rank(outcome);
  document.update({{"job", job},
                   {"time", static_cast<int64_t>(::time(nullptr))},
                   {"status", outcome.status},
                   {"cause", outcome.cause},
                   {"rank_error", read_rank_error(own)}});
  const std::string words = document.dump(2, ' ', false, json::error_handler_t::replace) + '\n';
  remove_rank_errors(paths);
  // Launchers of several hosts may write the same file. One that does not have the rank's own error leaves that of the
  // launcher that has it.
  std::error_code none;
  if (outcome.host != store::host_name() && std::filesystem::exists(error_file, none)) return;
  try {
    write_file(error_file, words);
  } catch (const Unavailable& error) {
    throw Unavailable(text("the job's error is in no file: ", error.message()), error.advice());
  }
}

}  // namespace muster::launch
