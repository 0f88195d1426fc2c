// Share: which items of an epoch are a rank's: r, r + replicas, r + 2 replicas … of the order that all ranks draw.
//
// Thread-safety: a value.
#pragma once

#include <cstddef>
#include <optional>

namespace muster::data {

struct Share {
  size_t replicas = 1, rank = 0;
  bool drop_last = false, pad = true;

  size_t size(size_t items) const {
    if (!pad) return items / replicas + (rank < items % replicas ? 1 : 0);
    return items / replicas + (!drop_last && items % replicas != 0 ? 1 : 0);
  }
  // The size of the rank that has the most.
  size_t longest(size_t items) const { return pad ? size(items) : (items + replicas - 1) / replicas; }
  // The place of this rank's k-th item. Padding needs nothing but the wrap-around.
  size_t place(size_t k, size_t items) const { return (rank + k * replicas) % items; }
};

// Takes from the calling thread's World what is not given. Throws InvalidArgument, whose text begins with `who`, as
// DistributedSampler documents.
Share make_share(const char* who, std::optional<int> num_replicas, std::optional<int> rank, bool drop_last = false,
                 bool pad = true);

// The calling thread's rank in its World; 0 without one.
int rank_in_world();

}  // namespace muster::data
