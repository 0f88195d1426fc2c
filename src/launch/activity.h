// What the ranks of a job do at the moment, from readings of their black boxes: the table of `muster top`.
//
// Samples a second come from two reports of the program that lie apart; from a single reading, from its first report to
// its last. The share of time in communication is the union of the collectives' times within the window that ends with
// the reading: since the reading before, or else the last ten seconds. Messages do not count: one that waits for its
// peer keeps nobody busy. A box holds 4,096 operations; where more have come, the window is as long as what is left.
//
// Nothing here costs the job anything: its memory is read, never written.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/black_box_sources.h"
#include "launch/jobs.h"
#include "launch/process_info.h"

namespace muster::launch {

struct RankActivity {
  JobRank who;
  std::optional<uint64_t> step, samples;
  std::optional<double> samples_per_second;  // of the whole job, as this rank sees it
  std::optional<double> communication;       // 0 to 1
  ProcessMemory memory;
  std::string operation;  // the last one, e.g. "all_reduce #12, 4 KiB, done 2 ms ago"; empty: none
};

struct JobActivity {
  JobSummary job;
  std::vector<RankActivity> ranks;
  std::optional<double> samples_per_second;  // the most that a rank sees
};

class ActivityWatch {
 public:
  JobActivity look(const JobBoxes& job);

 private:
  struct Report {
    uint64_t when, samples;
  };
  struct History {
    uint64_t box = 0;  // when it was made: another box is another history
    uint64_t looked_ns = 0;
    std::vector<Report> reports;  // different ones, the oldest first
  };
  std::optional<double> rate(const shm::BlackBoxSnapshot& box, uint64_t now, History& history) const;
  std::map<int, History> ranks_;
};

// The share of [from, to] in which a collective ran; nullopt where the rank has begun none.
std::optional<double> communication_share(const shm::BlackBoxSnapshot& box, uint64_t from_ns, uint64_t to_ns);

std::string activity_table(const JobActivity& activity);
std::string activity_json(const JobActivity& activity);  // one line

}  // namespace muster::launch
