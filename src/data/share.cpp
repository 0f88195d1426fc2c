#include "muster/data/share.h"

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"

namespace muster::data {

Share make_share(const char* who, std::optional<int> num_replicas, std::optional<int> rank, bool drop_last, bool pad) {
  const int replicas = num_replicas ? *num_replicas : World::current().world_size();
  const int own = rank ? *rank : World::current().rank();
  if (replicas < 1) throw InvalidArgument(text(who, ": num_replicas: expected 1 or more, got ", replicas));
  if (own < 0 || own >= replicas) {
    throw InvalidArgument(
        text(who, ": rank: expected 0 to ", replicas - 1, " among ", replicas, " replicas, got ", own),
        text("Use 0 to ", replicas - 1));
  }
  if (drop_last && !pad) {
    throw InvalidArgument(text(who, ": drop_last leaves samples out, but pad = false keeps all of them"),
                          "Choose one of the two");
  }
  return {
      .replicas = static_cast<size_t>(replicas), .rank = static_cast<size_t>(own), .drop_last = drop_last, .pad = pad};
}

int rank_in_world() {
  const World* const world = World::current_or_null();
  return world ? world->rank() : 0;
}

}  // namespace muster::data
