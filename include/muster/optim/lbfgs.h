// LBFGS: steps along directions that the last gradients give (a quasi-Newton method), for parameters and losses without
// noise. Its step() calls a closure several times.
//
//   muster::LBFGS lbfgs(net->parameters(), {.line_search_fn = muster::optim::LineSearch::kStrongWolfe});
//   lbfgs.step([&] {
//     lbfgs.zero_grad();
//     at::Tensor loss = loss_of(net->forward(x), y);
//     loss.backward();
//     return loss;
//   });
//
// With DistributedDataParallel, backward() gives all ranks the same gradients. The closure must also return a loss that
// is equal on all ranks: the mean of the ranks' losses. step() compares losses to decide whether it calls the closure
// again. If the losses differ, one rank may call it once more than the others. That rank then waits in backward() until
// its deadline. Each rank computes the directions by itself, with sums whose last bits depend on the number of threads
// and on the kind of processor. So give all ranks the same of both; DdpOptions::check_divergence_every tells whether
// the parameters stay equal.
//
//     at::Tensor loss = loss_of(ddp.forward(x), y);
//     loss.backward();
//     loss = loss.detach();
//     muster::all_reduce(loss, {.op = muster::ReduceOp::AVG});
//     return loss;
//
// Options, their defaults and the arithmetic are those of Python's torch.optim.LBFGS. On one CPU, with as many threads,
// the parameters are equal to the bit, with and without a line search, in float32 and float64. There is one group of
// parameters, and all of them are on one device. LBFGS sees them as one flat vector. A parameter without a gradient has
// zeros there, a sparse gradient becomes dense, and a complex number is two real ones.
//
// It is a torch::optim::Optimizer. Schedulers, archives (save(), load()) and Snapshot take it, and a training that goes
// on from these has the bits of one that was not interrupted. state_dict() has Python's names (docs/optim.md has the
// lines). GradScaler and StateOffload cannot step it, because they have no closure. ZeroRedundancyOptimizer and
// FullyShardedDataParallel cannot divide it, because a step needs all parameters and all gradients.
//
// Memory: 2 * history_size + 2 vectors of the size of all parameters. During step() there are as many more as it
// replaces, up to 2 * min(max_iter, history_size) + 2, and about 6 with a line search.
//
// Errors: InvalidArgument without a closure, for options out of their range (from step(), if they were changed) and for
// a second group, before anything has changed; for a loss that is not one real number. What the closure throws goes
// through step(): then the optimizer's state is that before the step, but the parameters are those that the closure
// saw. Set them back before the next step(), which takes their move since the last one for a single step.
// Thread-safety: none; one thread, as torch::optim::Optimizer.
// Source: torch.optim.LBFGS; Nocedal and Wright, "Numerical Optimization", 2006, algorithms 7.4, 7.5 (the direction),
// 3.5, 3.6 (the line search).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "muster/optim/param_group_options.h"

namespace muster {
namespace optim {

// How far a step goes along its direction.
enum class LineSearch : int64_t {
  kNone = 0,         // lr times the direction
  kStrongWolfe = 1,  // until the strong Wolfe conditions hold, beginning with lr; Python's "strong_wolfe"
};

struct LBFGSOptions {
  double lr = 1;
  int64_t max_iter = 20;           // directions per step(), at least 1
  int64_t max_eval = 0;            // after so many calls, no direction but the first begins; 0: max_iter * 5 / 4
  double tolerance_grad = 1e-7;    // step() ends when no element of the gradient is larger
  double tolerance_change = 1e-9;  // step() ends when the loss, or each element, changes by no more
  int64_t history_size = 100;      // pairs of vectors that are kept, at least 1
  LineSearch line_search_fn = LineSearch::kNone;
  static constexpr auto kFields = std::make_tuple(&LBFGSOptions::lr, &LBFGSOptions::max_iter, &LBFGSOptions::max_eval,
                                                  &LBFGSOptions::tolerance_grad, &LBFGSOptions::tolerance_change,
                                                  &LBFGSOptions::history_size, &LBFGSOptions::line_search_fn);
  static constexpr std::array kNames{"lr",           "max_iter",      "max_eval", "tolerance_grad", "tolerance_change",
                                     "history_size", "line_search_fn"};
};

// What LBFGS keeps. libtorch holds it as the state of the first parameter. A vector has one element per real number of
// the parameters, and their common dtype. The two counts are over all steps.
class LBFGSState final : public torch::optim::OptimizerParamState {
 public:
  int64_t func_evals = 0, n_iter = 0;         // calls of the closure, directions
  at::Tensor d, prev_flat_grad;               // undefined as long as n_iter is 0
  double t = 0, prev_loss = 0, h_diag = 1;    // Python's H_diag
  std::deque<at::Tensor> old_dirs, old_stps;  // differences of gradients and of parameters; the oldest comes first
  std::deque<double> ro;

  // By Python's names. The vectors of a list are the rows of one tensor. Python's `al` is not part of it, because each
  // step writes it before it reads it.
  std::map<std::string, at::Tensor> tensors() const;
  // The reverse. InvalidArgument, before anything has changed, for tensors that do not fit each other.
  void set_tensors(const std::map<std::string, at::Tensor>& tensors);

  void serialize(torch::serialize::InputArchive& archive) override;
  void serialize(torch::serialize::OutputArchive& archive) const override;
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override;
};

}  // namespace optim

class LBFGS : public torch::optim::Optimizer {
 public:
  using Options = optim::LBFGSOptions;
  using OptionsOfGroup = optim::ParamGroupOptions<Options>;

  // Parameters are floating-point or complex. InvalidArgument if there are none.
  explicit LBFGS(std::vector<at::Tensor> parameters, Options options = {});
  // One group. Its options, if it has some, replace `options`.
  explicit LBFGS(const std::vector<torch::optim::OptimizerParamGroup>& groups, Options options = {});

  // Throws InvalidArgument: there can be only one group.
  void add_param_group(const torch::optim::OptimizerParamGroup& group);
  // What was given; a max_eval of 0 has become max_iter * 5 / 4. They may be changed between steps.
  Options& options();
  const Options& options() const;

  // Calls the closure at most max_eval + 1 times, with gradients enabled. The closure zeroes the gradients, computes
  // the loss, calls backward(), and returns the loss: one real number. step() returns the first of these losses.
  at::Tensor step(LossClosure closure) override;

  void save(torch::serialize::OutputArchive& archive) const override;
  // Before anything has changed: InvalidArgument for a state of another number of elements, c10::Error for the archive
  // of another number of parameters, CorruptError for that of another class.
  void load(torch::serialize::InputArchive& archive) override;

  // Numbers and tensors by Python's names: "state.0.d", "state.0.old_dirs" (a row per vector), "param_groups.0.lr". The
  // vectors are copies. line_search_fn is 0 for Python's None, or 1 for "strong_wolfe".
  std::map<std::string, at::Tensor> state_dict() const;
  // InvalidArgument, before anything has changed: a name that this optimizer does not have, a tensor of another shape.
  // Options may be missing; a state that is missing is forgotten.
  void load_state_dict(const std::map<std::string, at::Tensor>& state);

 private:
  const optim::LBFGSState* kept() const;  // null before the first step
  // The state on the parameters' device, with their dtype. InvalidArgument if it has another number of elements.
  std::unique_ptr<optim::LBFGSState> fitting(const optim::LBFGSState& state) const;
};

}  // namespace muster
