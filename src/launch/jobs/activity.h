// What the ranks of a job do at the moment, from readings of their black boxes: the table of `muster top`.
//
// Samples per second come from two reports of the program at different times; from a single reading, they come from its
// first and its last report. The share of time in communication is the union of the collectives' times within a window
// that ends with the reading. The window begins with the reading before, or else ten seconds earlier. Messages do not
// count, because a message that waits for its peer keeps no rank busy. A box holds 4,096 operations; if more have come,
// the window is as long as the operations that are left.
//
// The job pays nothing for this: its memory is read, never written.
//
// Thread-safety: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "launch/black_box/black_box_sources.h"
#include "launch/jobs/jobs.h"
#include "launch/kit/process_info.h"

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
    uint64_t box = 0;  // when it was made; a box made at another time has another history
    uint64_t looked_ns = 0;
    std::vector<Report> reports;  // different ones, the oldest first
  };
  std::optional<double> rate(const shm::BlackBoxSnapshot& box, uint64_t now, History& history) const;
  std::map<int, History> ranks_;
};

// The share of [from, to] in which a collective ran; nullopt if the rank has begun none.
std::optional<double> communication_share(const shm::BlackBoxSnapshot& box, uint64_t from_ns, uint64_t to_ns);

std::string activity_table(const JobActivity& activity);
std::string activity_json(const JobActivity& activity);  // one line

}  // namespace muster::launch
