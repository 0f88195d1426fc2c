#include "muster/checkpoint/checkpoint.h"

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::detail {

SnapshotOptions options_of_checkpoint(const std::filesystem::path& folder, const CheckpointOptions& options) {
  return {.folder = folder,
          .training = "a checkpoint",  // so that save() replaces no snapshot of a training
          .sharded = options.sharded,
          .keep = 1,
          .local = {},
          .on_sigterm = false,
          .default_generator = false,
          .group = options.group,
          .timeout = options.timeout};
}

void load_newest(Snapshot& snapshot, const std::filesystem::path& folder, const CheckpointOptions& options) {
  if (restore_only(snapshot, {.strict = options.strict}) == 0)
    throw InvalidArgument(text("there is no checkpoint in ", folder.string()), "Name the folder that save() was given");
}

}  // namespace muster::detail
