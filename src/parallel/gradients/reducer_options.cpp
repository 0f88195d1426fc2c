// Of gradient_reducer.h: what users choose.
#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/gradients/gradient_reducer.h"

namespace muster::parallel {

size_t bytes_of_mb(double mb) { return static_cast<size_t>(std::min(mb, 1e9) * (1 << 20)); }

ReducerOptions checked(ReducerOptions options) {
  if (!(options.bucket_cap_mb > 0) || !(options.first_bucket_cap_mb > 0))
    throw InvalidArgument(
        text("bucket_cap_mb is ", options.bucket_cap_mb, " and first_bucket_cap_mb ", options.first_bucket_cap_mb),
        "Use sizes above 0, in MiB");
  if (!options.group.is_member())
    throw InvalidArgument(text("this rank is not a member of ", options.user, "'s group"));
  return options;
}

std::string words_of(const ReducerOptions& options) {
  return text(options.user, " bucket_cap_mb=", options.bucket_cap_mb,
              " first_bucket_cap_mb=", options.first_bucket_cap_mb,
              " find_unused_parameters=", options.find_unused_parameters, " static_graph=", options.static_graph,
              " broadcast_buffers=", options.broadcast_buffers, " sparse=", join(options.sparse));
}

}  // namespace muster::parallel
