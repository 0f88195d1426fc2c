// Averages a module's gradients over the ranks of a group while backward() goes on: for every rank
// (DistributedDataParallel), or for the ranks that own the parameter (FullyShardedDataParallel).
//
// A hook after each gradient's accumulation marks it ready. When all gradients of a bucket (buckets.h) and of those
// before it are ready, the bucket is reduced, while backward() goes on; backward() ends when all are. The order in
// which gradients become ready in the first step, on rank 0, becomes the order of the buckets from then on.
//
// Every rank reduces every bucket in every backward(), so that the ranks' collectives stay in step, whatever happens on
// one of them: what a rank has no gradient for counts as zero. `used` tells how many ranks had one. If backward()
// throws on a rank, that rank makes up for it in before_forward() or in its next backward(). There a parameter counts
// as used if it was ready. Of a backward() that throws before it comes to a parameter, the reducer learns nothing.
//
// With owners, of which each parameter has one, or one per host:
//   - After backward(), a parameter has a .grad on its owners only; elsewhere it is undefined.
//   - A large gradient that is another rank's is freed when it has been reduced, while backward() still goes on. If
//     more than `most_in_flight` bytes of them are not reduced yet, backward() waits.
//   - A gradient is reduced to its owner. With an owner on each of several hosts it is reduced to all ranks: the
//     network carries the same bytes as for the owners alone, and the ranks of a host need no groups of their own.
//   - A small all_reduce at the end tells all ranks which parameters were used. So backward() returns on no rank before
//     it is over on all.
//   - A parameter may be in parts with an owner each. What follows is true of its parts, too, but for averages that are
//     there when a backward() begins: this is what a part's .grad holds, so its owner need not put it aside.
//   - The averages of two backward() calls add up, as they do in one process. The owner puts the first average aside
//     while the second backward() runs, because the other ranks have nothing to add to it.
//
// backward() may run inside of backward(), as in reentrant checkpoints. Gradients are averaged at the end of a
// backward() that was called where forward() was: outside of any, or in the same node. Until then they add up, also
// those of an inner backward() that threw, if the outer one goes on. Without owners, a parameter may get several
// gradients: it is ready after as many as it got at most before, and at the end as long as that is not known. This
// needs that all run in one thread. libtorch goes on in other threads from 60 backward() calls inside of each other on;
// and a node whose results are on the CPU runs in another thread than backward() of tensors on a device that is called
// there.
//
// With static_graph, the first backward() that has averaged tells how many gradients each parameter gets in each of the
// later ones. A bucket does not wait for parameters that get none. On all ranks, backward() throws InvalidArgument for
// parameters that got another number on some rank, and in the first one for those that got some on some ranks only.
//
// backward() with create_graph, without owners: each .grad becomes an average that is a function of the parameters. It
// is not in a bucket; all gradients are averaged at the end, by a collective that autograd differentiates. With owners
// it is refused before it has changed a gradient: an owner has no graph of what other ranks have added.
//
// A sparse gradient (in coordinate format, one sparse dimension) stays one: the average has the rows of all ranks.
//
// Errors: InvalidArgument, on every rank alike, which names the parameters that some ranks had no gradient for; of a
// sparse gradient that was not announced; of a further gradient for a parameter in one backward() (that is, of a
// backward() inside of it), when those before have been reduced. InvalidArgument of backward() in no_sync(), on ranks
// that have an average to which it would add. And the errors of the collectives.
//
// Thread-safety: one thread, as an nn::Module.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/comm/group.h"
#include "muster/comm/heap.h"
#include "muster/parallel/comm_hook.h"
#include "parallel/kit/buckets.h"
#include "parallel/modules/same_module.h"

namespace muster::parallel {

struct ReducerOptions {
  std::string user;  // the class that reduces, for messages
  Group group;       // resolved; this rank is a member
  double bucket_cap_mb = 25, first_bucket_cap_mb = 1;
  bool find_unused_parameters = false;
  bool static_graph = false;  // without owners
  bool replace_allocator = true;
  bool broadcast_buffers = true;  // the reducer leaves this to its user
  // By parameter: its owner, a rank in the group. Empty: every rank gets every average. If each host has an owner, this
  // is the one on this rank's host; parameters with one owner on one host have one owner on every host.
  std::vector<int> owners = {};
  // By parameter; empty: none is in parts. One that is has the owner kRanksOfParts and at least GradientBlocks::kLarge
  // bytes. Its parts get gradients on their owners, and it has none after backward().
  std::vector<std::vector<Rows>> parts = {};
  std::vector<bool> delayed = {};   // by parameter: whether it is averaged after all others; empty: none is
  std::vector<bool> sparse = {};    // by parameter: whether its gradient is sparse; empty: none is. Not with owners.
  bool owner_on_each_host = false;  // of several hosts; then every rank takes part in every average
  // By parameter: in which dtype its gradient travels between hosts; none: in its own. Empty: all in their own.
  std::vector<std::optional<at::ScalarType>> reduce_dtypes = {};
  size_t most_in_flight = std::numeric_limits<size_t>::max();
  // When a backward() that is not in no_sync() begins. `with_graph`: with create_graph.
  std::function<void(bool with_graph)> on_begin = [](bool) {};
  // When a backward() that averages is over on this rank, before the others learn of it.
  std::function<void()> on_end = [] {};
  // After each backward() that was not in no_sync(), on every rank, when it is over on all (with owners).
  // `is_complete`: whether it ended without an exception on this rank.
  std::function<void(bool is_complete)> on_averaged = [](bool) {};
};

// Of a backward() that has averaged, on this rank.
struct BackwardTimes {
  Clock::time_point first_bucket;   // its average began
  Clock::time_point all_gradients;  // of this rank were there
  Clock::time_point averaged;
};

class GradientReducer {
 public:
  // `parameters` require gradients, and none occurs twice.
  GradientReducer(const std::vector<NamedTensor>& parameters, ReducerOptions options, std::shared_ptr<Heap> heap);
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;
  ~GradientReducer();

  // InvalidArgument if a parameter is also one of another reducer, whose averages would take the place of these.
  void require_no_other() const;
  // InvalidArgument if a gradient is a sum of no_sync() that is not averaged yet.
  void require_averages(const std::string& what) const;
  void before_forward();
  void end_failed_backward();  // makes up for a backward() that threw
  bool sync() const;
  bool set_sync(bool on);                                      // returns the previous value
  std::vector<std::vector<std::string>> bucket_names() const;  // parameters of each bucket, in order
  std::vector<size_t> bucket_bytes() const;                    // the same, bytes of these
  double bucket_cap_mb() const;
  bool has_rebuilt_buckets() const;
  bool has_hook() const;
  const BackwardTimes& times() const;  // of the last backward() that averaged, in on_averaged
  // Without owners: from the next backward() on, instead of averaging. InvalidArgument if there is one already.
  void set_hook(CommHook hook);
  // Without owners. For ranks that have no more data: what backward() does on the others, with gradients that do not
  // count. Afterwards each .grad is the average, as there.
  void backward_without_data();
  // From the next backward() on: whether buckets are averaged when it has ended, and not while it goes on. Then
  // on_begin comes there, too.
  void set_averages_at_end(bool at_end);
  bool is_in_backward() const;  // one that is to average, and has not; also if it threw
  // So many ranks have data. `average_over_them`: gradients become their averages; else those of all ranks, with zeros.
  void set_contributors(int count, bool average_over_them);
  // Without owners and sparse gradients, outside of backward(): adds to each .grad what `reduce` makes, in place, of
  // the given gradients. It gets one tensor per bucket, where undefined gradients are zeros. Then as after backward().
  // `shares`: of this rank's shards that have used each parameter. InvalidArgument if a backward() in no_sync() has
  // left sums that are not averaged.
  void add_gradients(const std::vector<at::Tensor>& given, std::vector<float> shares,
                     const std::function<void(const at::Tensor& bucket)>& reduce);

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

size_t bytes_of_mb(double mb);  // MiB

// InvalidArgument if bucket sizes are not above 0, or this rank is not a member of the group.
ReducerOptions checked(ReducerOptions options);
// What a user has chosen in DdpOptions or FsdpOptions, checked.
template <typename Options>
ReducerOptions reducer_options(std::string user, const Options& options) {
  return checked({.user = std::move(user),
                  .group = options.group.resolved(),
                  .bucket_cap_mb = std::optional(options.bucket_cap_mb).value_or(ReducerOptions().bucket_cap_mb),
                  .first_bucket_cap_mb = options.first_bucket_cap_mb,
                  .find_unused_parameters = options.find_unused_parameters,
                  .replace_allocator = options.replace_allocator,
                  .broadcast_buffers = options.broadcast_buffers});
}

// Whether small gradients need another bucket than the first one. Otherwise bucket_cap_mb decides nothing.
bool exceed_first_bucket(const std::vector<NamedTensor>& parameters, const ReducerOptions& options);

// For require_same_on_all_ranks().
std::string words_of(const ReducerOptions& options);

}  // namespace muster::parallel
