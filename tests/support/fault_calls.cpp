#include "support/fault_calls.h"

#include <ATen/ops/zeros.h>

#include "muster/comm/collectives.h"
#include "support/patterns.h"

namespace muster::test {

at::Tensor mine(World& world, int64_t count) { return tile(table_of(at::kFloat, world.rank()), 0, count); }

namespace {

std::vector<at::Tensor> many(World& world, int64_t count) {
  std::vector<at::Tensor> list;
  for (int r = 0; r < world.world_size(); ++r) list.push_back(mine(world, count));
  return list;
}
at::Tensor room(World& world, int64_t count) { return at::zeros({count * world.world_size()}); }

}  // namespace

const std::vector<Call> kCalls = {
    {"all_reduce",
     [](World& w, int64_t n) {
       const auto t = mine(w, n);
       all_reduce(t);
       return t;
     }},
    {"all_reduce on the heap",
     [](World& w, int64_t n) {
       const auto t = w.heap().empty({n}).copy_(mine(w, n));
       all_reduce(t);
       return t;
     }},
    {"all_reduce_async",
     [](World& w, int64_t n) {
       const auto t = mine(w, n);
       all_reduce_async(t).wait();
       return t;
     }},
    {"reduce",
     [](World& w, int64_t n) {
       const auto t = mine(w, n);
       reduce(t, 0);
       return t;
     }},
    {"scan",
     [](World& w, int64_t n) {
       const auto t = mine(w, n);
       scan(t);
       return t;
     }},
    {"broadcast",
     [](World& w, int64_t n) {
       const auto t = mine(w, n);
       broadcast(t, kVictim);
       return t;
     }},
    {"all_gather",
     [](World& w, int64_t n) {
       const auto t = room(w, n);
       all_gather_into_tensor(t, mine(w, n));
       return t;
     }},
    {"reduce_scatter",
     [](World& w, int64_t n) {
       const auto t = at::zeros({n});
       reduce_scatter(t, many(w, n));
       return t;
     }},
    {"gather",
     [](World& w, int64_t n) {
       const auto t = many(w, n);
       gather(mine(w, n), w.rank() == 0 ? t : std::vector<at::Tensor>{}, 0);
       return t[kVictim];
     }},
    {"scatter",
     [](World& w, int64_t n) {
       const auto t = at::zeros({n});
       scatter(t, w.rank() == kVictim ? many(w, n) : std::vector<at::Tensor>{}, kVictim);
       return t;
     }},
    {"all_to_all_single",
     [](World& w, int64_t n) {
       const auto t = room(w, n);
       all_to_all_single(t, room(w, n) + 1 + w.rank());
       return t;
     }},
};
const Call kBarrier = {"barrier", [](World&, int64_t) {
                         barrier();
                         return at::Tensor();
                       }};

}  // namespace muster::test
