// Functional optimizers: a step takes the gradients as an argument, not from .grad.
//
//   optim::Adam adam({.lr = 1e-3, .weight_decay = 0.1});
//   adam.step(parameters, gradients);   // a parameter whose gradient is undefined stays as it is
//
// So each context (muster/autograd/context.h), thread or micro-batch may have its own gradients. The arithmetic, the
// names and the defaults of the options are those of Python's torch.optim, also where C++'s torch::optim differs
// (Adagrad's eps, AdamW's decay). An optimizer's state of a parameter begins with the parameter's first gradient.
//
// Your own optimizer: a class derived from FunctionalOptimizer with an update() of one parameter (docs/optim.md has
// one), or any class with step(), lr(), set_lr() and Options: the concept Optimizer below.
//
// Complex parameters are treated as pairs of real ones, and so is their state; Adafactor and Muon refuse them. SGD
// without momentum and weight decay, and Adagrad without weight decay, accept sparse gradients; the others throw
// InvalidArgument.
//
// Errors: InvalidArgument, before anything has changed: options out of their range (from the constructor), lists of
// different lengths, a gradient of another shape than its parameter, a sparse gradient that is not accepted.
//
// Thread-safety: there is no lock around the arithmetic. Two step() of one optimizer may run concurrently if no
// parameter is in both; a mutex guards only the table of states. Two concurrent steps of the same parameter are
// HogWild: they do not crash, but of each element the last write wins, and the state may be that of either; give each
// thread its own optimizer, or lock. state() and load_state() must not run concurrently with a step() of their
// parameters. lr() and set_lr() may be called any time; a step() that runs keeps the rate with which it began.
// Source: torch.optim (single-tensor algorithms; SGD, Adagrad, Adam and AdamW of dense floats and doubles on the CPU,
// and of dense floating-point numbers on a CUDA device: fused=True); torch.distributed.optim._functional_*.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace muster::optim {

// Any class that can step, and that O(options) constructs from an O::Options.
template <typename O>
concept Optimizer = requires(O& optimizer, const O& same, at::TensorList parameters, at::TensorList gradients,
                             double lr) {
  typename O::Options;
  requires std::constructible_from<O, typename O::Options>;
  optimizer.step(parameters, gradients);
  optimizer.set_lr(lr);
  { same.lr() } -> std::convertible_to<double>;
};

// A complex tensor as pairs of real numbers; any other as it is.
at::Tensor as_real(const at::Tensor& tensor);

// An optimizer's state of one parameter.
struct ParameterState {
  int64_t step = 0;                  // number of steps so far, the present one included
  std::array<at::Tensor, 3> kept{};  // in the order of the optimizer's names
};

class FunctionalOptimizer {
 public:
  using State = std::map<std::string, at::Tensor>;

  virtual ~FunctionalOptimizer() = default;
  FunctionalOptimizer(const FunctionalOptimizer&) = delete;
  FunctionalOptimizer& operator=(const FunctionalOptimizer&) = delete;

  // One gradient for each parameter. Gradients are not changed.
  void step(at::TensorList parameters, at::TensorList gradients);
  // With states that the caller keeps, one for each parameter, which only optimizers of this class have changed. The
  // caller has called require_steppable() with the same lists; this function checks nothing.
  void step(at::TensorList parameters, at::TensorList gradients, const std::vector<ParameterState*>& states) const;
  // Throws the InvalidArgument that step() would throw before it changes anything.
  void require_steppable(at::TensorList parameters, at::TensorList gradients) const;

  double lr() const { return lr_.load(std::memory_order_relaxed); }
  void set_lr(double lr);  // InvalidArgument: below 0, or not finite
  // Takes any rate. For what a schedule has set in a torch::optim::Optimizer.
  void set_scheduled_lr(double lr) { lr_.store(lr, std::memory_order_relaxed); }

  // The state of these parameters, under "<index>.<PyTorch's name>": "0.step", "0.exp_avg"; a parameter that never had
  // a gradient has none. The tensors are copies.
  State state(at::TensorList parameters) const;
  // Replaces the state of these parameters. InvalidArgument, before anything has changed: a name that this optimizer
  // does not have, a tensor of another shape than the parameter's, a tensor without its step.
  void load_state(at::TensorList parameters, const State& state);

  // PyTorch's names of the tensors in ParameterState::kept.
  const std::vector<std::string>& state_names() const { return names_; }
  // A tensor with the shape and dtype of one of them; by default the parameter's.
  virtual at::Tensor empty_kept(size_t index, const at::Tensor& parameter) const;
  // Whether the number of steps is a part of the state, as in Python's state_dict().
  virtual bool counts_steps() const { return true; }

 protected:
  // `names`: of the tensors in ParameterState::kept, at most three.
  FunctionalOptimizer(double lr, std::vector<std::string> names);

  // Updates one parameter, without recording autograd; the parameter is real and has the gradient's shape. `state.step`
  // counts this step already. The gradient must not be changed: it may be a context's own tensor.
  virtual void update(double lr, at::Tensor& parameter, const at::Tensor& gradient, ParameterState& state) const = 0;

  struct Item {
    at::Tensor parameter, gradient;
    ParameterState* state;  // state->step does not count this step yet
  };
  // Updates all parameters of one step(). An override passes many of them to one of libtorch's fused kernels; this
  // implementation calls update_one() for each.
  virtual void update_all(double lr, std::vector<Item>& items) const;
  void update_one(double lr, Item& item) const;
  virtual bool takes_sparse() const { return false; }
  // Throws InvalidArgument for a parameter that the optimizer cannot step.
  virtual void check(const at::Tensor& /*parameter*/) const {}

 private:
  struct Known {
    at::Tensor parameter;  // held so that no other tensor can get its address
    ParameterState state;
  };
  Known& known(const at::Tensor& parameter);  // with the lock

  std::atomic<double> lr_;
  const std::vector<std::string> names_;
  mutable std::mutex mutex_;  // guards the table, not what is in it
  std::unordered_map<const at::TensorImpl*, std::unique_ptr<Known>> table_;
};

// kFields lists the fields and kNames their names, for code that stores options or sends them (distributed_optimizer.h,
// optimizers.h).
struct SGDOptions {
  double lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0;
  bool nesterov = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&SGDOptions::lr, &SGDOptions::momentum, &SGDOptions::dampening, &SGDOptions::weight_decay,
                      &SGDOptions::nesterov, &SGDOptions::maximize);
  static constexpr std::array kNames{"lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"};
};
struct AdagradOptions {
  double lr = 1e-2, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10;
  bool maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&AdagradOptions::lr, &AdagradOptions::lr_decay, &AdagradOptions::weight_decay,
                      &AdagradOptions::initial_accumulator_value, &AdagradOptions::eps, &AdagradOptions::maximize);
  static constexpr std::array kNames{"lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps", "maximize"};
};
struct AdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool amsgrad = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&AdamOptions::lr, &AdamOptions::betas, &AdamOptions::eps, &AdamOptions::weight_decay,
                      &AdamOptions::amsgrad, &AdamOptions::maximize);
  static constexpr std::array kNames{"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"};
};
struct AdamWOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 1e-2;
  bool amsgrad = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&AdamWOptions::lr, &AdamWOptions::betas, &AdamWOptions::eps, &AdamWOptions::weight_decay,
                      &AdamWOptions::amsgrad, &AdamWOptions::maximize);
  static constexpr std::array kNames{"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"};
};
struct AdadeltaOptions {
  double lr = 1.0, rho = 0.9, eps = 1e-6, weight_decay = 0;
  bool maximize = false;
  static constexpr auto kFields = std::make_tuple(&AdadeltaOptions::lr, &AdadeltaOptions::rho, &AdadeltaOptions::eps,
                                                  &AdadeltaOptions::weight_decay, &AdadeltaOptions::maximize);
  static constexpr std::array kNames{"lr", "rho", "eps", "weight_decay", "maximize"};
};
struct RMSpropOptions {
  double lr = 1e-2, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0;
  bool centered = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&RMSpropOptions::lr, &RMSpropOptions::alpha, &RMSpropOptions::eps, &RMSpropOptions::weight_decay,
                      &RMSpropOptions::momentum, &RMSpropOptions::centered, &RMSpropOptions::maximize);
  static constexpr std::array kNames{"lr", "alpha", "eps", "weight_decay", "momentum", "centered", "maximize"};
};
struct AdamaxOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool maximize = false;
  static constexpr auto kFields = std::make_tuple(&AdamaxOptions::lr, &AdamaxOptions::betas, &AdamaxOptions::eps,
                                                  &AdamaxOptions::weight_decay, &AdamaxOptions::maximize);
  static constexpr std::array kNames{"lr", "betas", "eps", "weight_decay", "maximize"};
};
struct NAdamOptions {
  double lr = 2e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0, momentum_decay = 4e-3;
  bool decoupled_weight_decay = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&NAdamOptions::lr, &NAdamOptions::betas, &NAdamOptions::eps, &NAdamOptions::weight_decay,
                      &NAdamOptions::momentum_decay, &NAdamOptions::decoupled_weight_decay, &NAdamOptions::maximize);
  static constexpr std::array kNames{
      "lr", "betas", "eps", "weight_decay", "momentum_decay", "decoupled_weight_decay", "maximize"};
};
struct RAdamOptions {
  double lr = 1e-3;
  std::pair<double, double> betas{0.9, 0.999};
  double eps = 1e-8, weight_decay = 0;
  bool decoupled_weight_decay = false, maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&RAdamOptions::lr, &RAdamOptions::betas, &RAdamOptions::eps, &RAdamOptions::weight_decay,
                      &RAdamOptions::decoupled_weight_decay, &RAdamOptions::maximize);
  static constexpr std::array kNames{"lr", "betas", "eps", "weight_decay", "decoupled_weight_decay", "maximize"};
};
struct ASGDOptions {
  double lr = 1e-2, lambd = 1e-4, alpha = 0.75, t0 = 1e6, weight_decay = 0;
  bool maximize = false;
  static constexpr auto kFields = std::make_tuple(&ASGDOptions::lr, &ASGDOptions::lambd, &ASGDOptions::alpha,
                                                  &ASGDOptions::t0, &ASGDOptions::weight_decay, &ASGDOptions::maximize);
  static constexpr std::array kNames{"lr", "lambd", "alpha", "t0", "weight_decay", "maximize"};
};
struct AdafactorOptions {
  double lr = 1e-2, beta2_decay = -0.8;
  std::pair<double, double> eps{0, 1e-3};  // the first 0: the smallest number of the dtype that changes 1
  double d = 1, weight_decay = 0;
  bool maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&AdafactorOptions::lr, &AdafactorOptions::beta2_decay, &AdafactorOptions::eps,
                      &AdafactorOptions::d, &AdafactorOptions::weight_decay, &AdafactorOptions::maximize);
  static constexpr std::array kNames{"lr", "beta2_decay", "eps", "d", "weight_decay", "maximize"};
};
struct MuonOptions {  // for matrices only: InvalidArgument for others
  double lr = 1e-3, weight_decay = 0.1, momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int64_t ns_steps = 5;
  bool match_rms_adamw = false;  // Python's adjust_lr_fn; false: "original"
  static constexpr auto kFields = std::make_tuple(
      &MuonOptions::lr, &MuonOptions::weight_decay, &MuonOptions::momentum, &MuonOptions::nesterov,
      &MuonOptions::ns_coefficients, &MuonOptions::eps, &MuonOptions::ns_steps, &MuonOptions::match_rms_adamw);
  static constexpr std::array kNames{"lr",  "weight_decay", "momentum",       "nesterov", "ns_coefficients",
                                     "eps", "ns_steps",     "match_rms_adamw"};
};
struct RpropOptions {
  double lr = 1e-2;  // the size of the first steps only
  std::pair<double, double> etas{0.5, 1.2}, step_sizes{1e-6, 50};
  bool maximize = false;
  static constexpr auto kFields =
      std::make_tuple(&RpropOptions::lr, &RpropOptions::etas, &RpropOptions::step_sizes, &RpropOptions::maximize);
  static constexpr std::array kNames{"lr", "etas", "step_sizes", "maximize"};
};

#define MUSTER_OPTIMIZER(NAME, SPARSE, ...)                                                                          \
  class NAME final : public FunctionalOptimizer {                                                                    \
   public:                                                                                                           \
    using Options = NAME##Options;                                                                                   \
    explicit NAME(Options options = {});                                                                             \
    const Options& options() const { return options_; } /* lr: the initial rate */                                   \
                                                                                                                     \
   private:                                                                                                          \
    void update(double lr, at::Tensor& parameter, const at::Tensor& gradient, ParameterState& state) const override; \
    bool takes_sparse() const override { return SPARSE; }                                                            \
    __VA_ARGS__                                                                                                      \
    Options options_;                                                                                                \
  }
#define MUSTER_FUSED void update_all(double lr, std::vector<Item>& items) const override;
#define MUSTER_UNCOUNTED \
  bool counts_steps() const override { return false; }
#define MUSTER_CHECK void check(const at::Tensor& parameter) const override;
#define MUSTER_SHAPES at::Tensor empty_kept(size_t index, const at::Tensor& parameter) const override;
MUSTER_OPTIMIZER(SGD, options_.momentum == 0 && options_.weight_decay == 0, MUSTER_FUSED MUSTER_UNCOUNTED);
MUSTER_OPTIMIZER(Adagrad, options_.weight_decay == 0, MUSTER_FUSED);
MUSTER_OPTIMIZER(Adam, false, MUSTER_FUSED);
MUSTER_OPTIMIZER(AdamW, false, MUSTER_FUSED);
MUSTER_OPTIMIZER(Adadelta, false);
MUSTER_OPTIMIZER(RMSprop, false);
MUSTER_OPTIMIZER(Adamax, false);
MUSTER_OPTIMIZER(NAdam, false, MUSTER_SHAPES);
MUSTER_OPTIMIZER(RAdam, false);
MUSTER_OPTIMIZER(ASGD, false, MUSTER_SHAPES);
MUSTER_OPTIMIZER(Rprop, false);
MUSTER_OPTIMIZER(Adafactor, false, MUSTER_SHAPES MUSTER_CHECK);
MUSTER_OPTIMIZER(Muon, false, MUSTER_CHECK MUSTER_UNCOUNTED);
#undef MUSTER_UNCOUNTED
#undef MUSTER_CHECK
#undef MUSTER_SHAPES
#undef MUSTER_FUSED
#undef MUSTER_OPTIMIZER

}  // namespace muster::optim
