// What gradient_reducer.cpp (the course of a backward()) and gradient_averages.cpp (the averages) share.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/graph/node.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/gradients/gradient_reducer.h"
#include "parallel/kit/buckets.h"
#include "parallel/kit/gradient_blocks.h"

namespace muster::parallel {

// Whether all ranks reached all parameters.
inline bool complete(const std::vector<float>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](float share) { return share >= 1; });
}

// With static_graph: all ranks reached a parameter, or none did.
inline bool are_those_of_a_static_graph(const std::vector<float>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](float share) { return share == 0 || share >= 1; });
}
inline bool are_all_zero(const std::vector<float>& shares) {
  return std::all_of(shares.begin(), shares.end(), [](float share) { return share == 0; });
}

struct GradientReducer::Impl : std::enable_shared_from_this<GradientReducer::Impl> {
  Impl(ReducerOptions with, std::shared_ptr<Heap> its_heap)
      : options(std::move(with)),
        heap(std::move(its_heap)),
        blocks(heap, options.replace_allocator),
        averages_among(options.group),
        contributors(options.group.size()) {}

  const ReducerOptions options;
  const std::shared_ptr<Heap> heap;
  GradientBlocks blocks;

  std::vector<Parameter> parameters;  // trainable, in the module's order
  std::vector<Bucket> buckets;
  CommHook hook;                        // or none
  std::optional<Group> averages_among;  // the ranks among which the hook averages; none: it does not
  std::string wrong_results;            // of the hook, in this backward()
  std::vector<size_t> ready_order;      // parameters in the order in which the first step's gradients came
  bool rebuilt = false;
  // With static_graph. Whether each parameter's `expected` is what it got in the first backward(); whether the
  // backward() under way is that first one; whether it gave a parameter more, when its average had begun.
  bool knows_graph = false, learns_graph = false, has_another_graph = false;
  bool laid_out = false;  // whether there are buckets: memory may run out while they are laid out anew
  int contributors;       // ranks with data
  bool averages_over_contributors = false;

  BackwardTimes times;  // of the backward() under way, or of the last

  bool sync = true;  // whether the next backward() reduces
  bool averages_at_end = false;
  bool synced = true;        // whether the last backward() that began reduces
  bool keeps_graph = false;  // whether it makes a graph (create_graph)
  // The backward() under way: alive as long as autograd holds its final callback. So a backward() that threw, whose
  // callback never ran, can be distinguished from one that is still running.
  class UnderWay;
  std::weak_ptr<UnderWay> running;
  bool dirty = false;  // a backward() has begun and has been neither finished nor abandoned
  // The node whose evaluation called the last forward() with gradients; null if that was outside of any backward().
  autograd::WeakPtrTo<torch::autograd::Node> forward_in{autograd::NodePtr()};
  size_t next_bucket = 0;      // buckets are reduced in order, the same on all ranks
  size_t released_bucket = 0;  // with owners: the first whose block may be in use after its reduction
  size_t bytes_in_flight = 0;  // of large gradients between both numbers, which will be freed

  bool some_buckets_tell_no_shares = false;

  bool sharded() const { return !options.owners.empty(); }
  bool is_mine(const Parameter& parameter) const {
    return parameter.owner == kEveryRank || parameter.owner == options.group.rank();
  }

  void build(std::vector<size_t> order);
  void hear_of_accumulation(size_t index);  // sees to it that before_accumulation() is called
  void before_accumulation(size_t index);
  void on_ready(size_t index);
  void adopt(Parameter& parameter);
  ReduceOptions averaging(const std::optional<at::ScalarType>& between_hosts = {}) const {
    return {.op = ReduceOp::AVG, .group = options.group, .between_hosts = between_hosts};
  }
  ReduceOptions averaging(const Bucket& bucket) const { return averaging(bucket.reduce_dtype); }
  bool to_owner() const { return sharded() && !options.owner_on_each_host; }
  // Whether all ranks know that all parameters were used, so that they may agree on the order of the buckets.
  bool may_rebuild(const std::vector<float>& shares) const {
    const bool tells_order =
        options.static_graph ? are_those_of_a_static_graph(shares) && !are_all_zero(shares) : complete(shares);
    return tells_order && !keeps_graph && averages_among_all() && contributors == options.group.size();
  }
  bool averages_among_all() const { return averages_among && averages_among->size() == options.group.size(); }
  // Whether some ranks have no data. A hook that averages among fewer ranks makes of that what it likes.
  bool lacks_contributors() const { return contributors != options.group.size() && averages_among_all(); }
  // Of averages over all ranks, to become those over the ranks with data.
  double scale() const {
    return averages_over_contributors && lacks_contributors() ? static_cast<double>(options.group.size()) / contributors
                                                              : 1;
  }
  // Whether a collective of its own tells which parameters were used; else buckets do.
  bool tells_shares_apart() const { return sharded() || hook || some_buckets_tell_no_shares; }
  void require_buckets() const {
    if (!laid_out)
      throw Unavailable(text(options.user, " has no buckets for gradients: memory ran out when it laid them out in ",
                             "another order, after an earlier backward()"),
                        text("Make a new ", options.user, ", with more memory"));
  }
  void begin_communication() {
    if (times.first_bucket == Clock::time_point()) times.first_bucket = Clock::now();
  }
  void expect_known_gradients();
  void give_zeros(Parameter& parameter);
  float mark_of(const Parameter& parameter) const;
  // In the buckets that have not begun: that this rank's parameters are another's, whose bucket has. Less than the sum
  // of what all ranks can say by mark_of().
  float mark_of_another_graph() const {
    const auto n = static_cast<float>(options.group.size());
    return -n * (n + 2);
  }
  void mark_used(Bucket& bucket) const;
  void launch(size_t index);
  void call_hook(size_t index);
  std::string use_hooks_results();
  std::vector<float> of_contributors(std::vector<float> shares) const;
  void finish(const std::vector<float>& shares, bool is_complete);
  // `sets`: whether each .grad becomes the average.
  std::vector<float> average_with_graph(bool sets);
  void use_averages(const std::vector<float>& shares);
  void launch_ready_buckets();
  bool will_be_freed(const Bucket& bucket) const;
  void end_reduction(Bucket& bucket);
  void release_reduced_blocks();
  void release_blocks_without_gradients();
  void leave_held_gradients();
  void begin_backward();
  void call_at_end(std::shared_ptr<GradientBlocks::Serving> serving);
  bool is_within_another() const;
  void end_failed_backward();
  void begin_averages_at_end();
  void put_averages_aside();
  std::vector<float> reduce_the_rest();
  std::vector<float> shares_used_on_all_ranks();
  void average_shares(std::vector<float>& shares) const;
  void finish_backward();
  void abandon_backward();
  void abandon_backward_before(Parameter& first);
  void reset();
  void rebuild_in_ready_order();
  void require_dense(const Parameter& parameter, const at::Tensor& grad) const;
  void report_unused(const std::vector<float>& shares, const char* of = "ranks") const;
};

}  // namespace muster::parallel
