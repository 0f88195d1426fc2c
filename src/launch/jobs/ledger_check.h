// The proof that every sample of every epoch counts once, from the lines of a ledger (ledger_line.h).
//
// An *attempt* begins with a model that has made so many steps, whether it comes from a snapshot or from memory. It
// replaces what earlier attempts did after that step. Its samples enter a step before their gradients travel, and the
// step is made when an optimizer has made it on any rank. An attempt that has made none replaces nothing, unless it is
// the last one. A model that has made n steps is taken for that of the latest attempt that has made step n. So a step
// of the last attempt counts if a rank has made it, and a step of an earlier one counts if no later attempt replaces
// it.
//
// Thread-safety: all functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::launch {

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
