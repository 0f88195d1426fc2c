// What a launcher and its ranks in muster::elastic::run() (train/elastic.h) tell each other, so that ranks can stay
// while other ranks are lost, replaced, left out or added.
//
// The keys are in the launcher's own store, which each host's launcher serves to the ranks that it started
// (MUSTER_LAUNCHER; on one host that is the job's store). <l> is the rank's number on that host:
//
//   elastic/rank/<l>   The rank's mark. "stays": the rank is in run(), and would meet others again. "<e>": the launcher
//                      has called the rank away from epoch e, and will write a word for it. "done": the rank waits for
//                      no further word. Absent: the rank is not in run() yet.
//   elastic/word/<l>   The launcher's word: the number of an epoch and the rank's place in it (ElasticWord). Or "stop",
//                      the last word: the job ends, and no epoch will come for a rank that waits for one, or for its
//                      peers to enter one. Only ranks that the launcher has called away get it; ranks that train learn
//                      of the end by a signal, at the next step.
//
// A mark changes only by compare-and-swap, so a rank that has come to its end is either called away or done, never
// both:
//
//   absent ──rank──▶ "stays" ──launcher──▶ "<e>" ──rank, with a word of an epoch after e──▶ "stays" ──rank──▶ "done"
//
// The numbers of epochs grow; over several hosts they are those of the launchers' rendezvous (rendezvous.h). What the
// ranks of epoch e tell each other is in the job's store, under elastic/epochs/<e>. A rank that is started while the
// job runs finds its epoch in MUSTER_EPOCH.
//
// Thread-safety: functions without state.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/text.h"
#include "muster/store/store.h"
#include "store/kit/stored_number.h"

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
  PlainOutput out;
  out << word.epoch << ' ' << word.rank << ' ' << word.world_size << ' ' << word.local_world_size << ' ' << word.node;
  return out.str();
}

// nullopt if `text` is not a word.
inline std::optional<ElasticWord> elastic_word(const std::string& text) {
  PlainInput in(text);
  ElasticWord word;
  if (in >> word.epoch >> word.rank >> word.world_size >> word.local_world_size >> word.node) return word;
  return std::nullopt;
}

// The epoch from which a mark calls its rank away; nullopt if it does not.
inline std::optional<int64_t> called_from(const std::optional<std::string>& mark) {
  return mark ? store::number_of(*mark, 0, INT64_MAX) : std::nullopt;
}

// The launcher calls a rank away from `epoch`. Returns its mark before that; "done" is not changed.
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
