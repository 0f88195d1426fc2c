// What a launcher and its ranks in muster::elastic::run() (train/elastic.h) say to each other: how ranks stay while
// others are lost, replaced, left out or added.
//
// The keys are in the launcher's own store, which each host's launcher serves to the ranks that it started
// (MUSTER_LAUNCHER; on one host that is the job's store), by the rank's number on that host:
//
//   elastic/rank/<l>   The rank's mark. "stays": it is in run(), and would meet others again. "<e>": the launcher has
//                      called it away from epoch e, and promises a word. "done": it wants no word any more. Absent: it
//                      is not in run() yet.
//   elastic/word/<l>   The launcher's word: a number of the epoch and the rank's place in it (ElasticWord). Or "stop",
//                      which is the last: the job ends, and no epoch will come for who waits for one, or for its
//                      peers to come into one. It says so to ranks that it has called away; those that train learn of
//                      the end by a signal, at the next step.
//
// A mark changes by compare-and-swap alone, so a rank that has come to its end is either called or done, never both:
//
//   absent ──rank──▶ "stays" ──launcher──▶ "<e>" ──rank, with a word of an epoch after e──▶ "stays" ──rank──▶ "done"
//
// Epochs are numbered upward; over several hosts they are those of the launchers' rendezvous (rendezvous.h). What the
// ranks of epoch e tell each other is in the job's store, under elastic/epochs/<e>. A rank that is started into a
// running job finds its epoch in MUSTER_EPOCH.
//
// Thread-safety: functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>

#include "muster/store/store.h"

namespace muster::launch {

inline constexpr const char* kLauncherVariable = "MUSTER_LAUNCHER";  // the address of the launcher's own store
inline constexpr const char* kEpochVariable = "MUSTER_EPOCH";
inline constexpr const char* kStays = "stays";
inline constexpr const char* kDone = "done";
inline constexpr const char* kStop = "stop";

inline std::string mark_key(int local_rank) { return "elastic/rank/" + std::to_string(local_rank); }
inline std::string word_key(int local_rank) { return "elastic/word/" + std::to_string(local_rank); }

// A rank's place in an epoch.
struct ElasticWord {
  int64_t epoch = 0;
  int rank = 0, world_size = 1;
  int local_world_size = 1;
  int node = 0;
};

inline std::string to_text(const ElasticWord& word) {
  std::ostringstream out;
  out << word.epoch << ' ' << word.rank << ' ' << word.world_size << ' ' << word.local_world_size << ' ' << word.node;
  return out.str();
}

// Nothing where that is no word.
inline std::optional<ElasticWord> elastic_word(const std::string& text) {
  std::istringstream in(text);
  ElasticWord word;
  if (in >> word.epoch >> word.rank >> word.world_size >> word.local_world_size >> word.node) return word;
  return std::nullopt;
}

// The epoch from which a mark calls its rank away; nothing where it does not.
inline std::optional<int64_t> called_from(const std::optional<std::string>& mark) {
  if (!mark || mark->empty() || mark->find_first_not_of("0123456789") != std::string::npos) return std::nullopt;
  return std::stoll(*mark);
}

// The launcher's side: calls a rank away from `epoch`. Its mark before: "done" where it is, and stays so.
inline std::optional<std::string> call_away(Store& store, int local_rank, int64_t epoch) {
  const std::string key = mark_key(local_rank), called = std::to_string(epoch);
  for (auto mark = store.try_get(key);;) {
    if (mark == kDone) return mark;
    const auto exchanged = store.compare_set(key, mark, called);
    if (exchanged.stored) return mark;
    mark = exchanged.value;
  }
}

}  // namespace muster::launch
