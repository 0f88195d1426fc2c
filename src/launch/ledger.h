// The lines of a ledger (muster/data/ledger.h), and the proof that every sample of every epoch counts once.
//
//   attempt 2 rank 1 of 4 after 100 of 60000 samples in resnet #5f3a09c1
//   step 101 attempt 2 rank 1 epoch 3: 17 4 33 #0be1d42a
//   made 101 attempt 2 rank 1 #90c1e277
//
// An *attempt* begins with a model that has made so many steps, whether it comes from a snapshot or from memory. It
// replaces what earlier attempts did after that step. Its samples enter a step before their gradients travel, and the
// step is made when an optimizer has made it on any rank. An attempt that has made none replaces nothing, unless it is
// the last one. A model that has made n steps is taken for that of the latest attempt that has made step n. So a step
// of the last attempt counts if a rank has made it, and a step of an earlier one counts if no later attempt replaces
// it.
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

struct LedgerCheckOptions {
  std::optional<uint64_t> epochs;  // these must be there, complete; else the last one may be under way
  uint64_t spare = 0;              // samples that may be missing or repeated in each epoch
};
struct LedgerCheck {
  bool is_exactly_once = false;
  std::string words;  // lines for people
};
// The files of one training together: those of its hosts. Unavailable if one cannot be read; CorruptError if none of
// them holds a ledger.
LedgerCheck check_ledger(const std::vector<std::string>& files, const LedgerCheckOptions& options = {});

}  // namespace muster::launch
