// torch's archives as entries, so that each tensor in them has its own name and checksums.
//
// Each value of an archive becomes an entry. The entry's kind is the value's type:
//   tensor; int, double, bool, string, none; ints, doubles (lists): the value, as one tensor
//   tensors (a list), tuple, archive: the number of their parts; the parts are the entries that follow
// An entry's name is the path to the value, "state/3/exp_avg". A slash within a key is written as a colon, a colon as
// %3A, and a per cent sign as %25.
//
// Optimizers name parameters by their address in memory. Entries name them by their position instead, counted from 1
// over all groups, so that ranks and runs agree.
//
// Errors: InvalidArgument for a value of another type. Thread-safety: functions without state.
#pragma once

#include <torch/serialize/archive.h>

#include <functional>

#include "checkpoint/entry.h"

namespace muster::checkpoint {

using SaveFn = std::function<void(torch::serialize::OutputArchive&)>;
using LoadFn = std::function<void(torch::serialize::InputArchive&)>;

Entries save_archive(const SaveFn& save);
// `entries` are those of one item, in order. The loaded tensors do not share memory with them.
void load_archive(const Entries& entries, const LoadFn& load);

}  // namespace muster::checkpoint
