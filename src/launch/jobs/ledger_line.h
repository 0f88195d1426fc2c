// The lines of a ledger (muster/data/ledger.h). ledger_check.h says what they prove.
//
//   attempt 2 rank 1 of 4 after 100 of 60000 samples in resnet #5f3a09c1
//   step 101 attempt 2 rank 1 epoch 3: 17 4 33 #0be1d42a
//   made 101 attempt 2 rank 1 #90c1e277
//
// Every line ends with a hash of what is before it. Ranks append to one file; a rank that is killed may leave a part of
// a line, so each line begins with a line break, too. Parts of lines are counted, and otherwise ignored.
//
// Thread-safety: all functions.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace muster::launch {

struct LedgerLine {
  enum class Kind { kAttempt, kStep, kMade };
  Kind kind = Kind::kAttempt;
  int64_t attempt = 0;
  int rank = 0;
  int64_t step = 0;  // from 1; of an attempt: the steps that its model has made before
  // Of an attempt.
  int ranks = 0;
  uint64_t dataset_size = 0;  // 0: not known
  std::string training;
  // Of a step.
  uint64_t epoch = 0;
  std::vector<uint64_t> samples;
};

std::string to_string(const LedgerLine& line);                  // with both line breaks
std::optional<LedgerLine> parse_ledger_line(std::string_view);  // without them; none if it is not one, or not whole

// Calls fn for every whole line of the file. Returns the number of the others. Unavailable if it cannot be read.
int64_t read_ledger(const std::string& file, const std::function<void(const LedgerLine&)>& fn);

}  // namespace muster::launch
