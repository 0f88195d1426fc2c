// torch's archives as entries, so that each tensor in them has its own name and checksums.
//
// A value of an archive becomes an entry whose kind is what it was:
//   tensor; int, double, bool, string, none; ints, doubles (lists), each as one tensor
//   tensors (a list), tuple, archive: the number of their parts, which are the entries that follow
// A name is the way to the value, "state/3/exp_avg". Keys may have slashes of their own, which become colons there, and
// colons and per cent signs are written %3A and %25.
//
// Optimizers name parameters by their address in memory; here they get the number of their place instead, counted from
// 1 over all groups, so that ranks and runs agree.
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
// `entries`: of one item, in order. Tensors get memory of their own.
void load_archive(const Entries& entries, const LoadFn& load);

}  // namespace muster::checkpoint
