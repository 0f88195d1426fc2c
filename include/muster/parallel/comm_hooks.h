// Communication hooks for DistributedDataParallel (comm_hook.h), for slow networks.
//
//   ddp.register_comm_hook(muster::comm_hooks::bf16_compress);
//   ddp.register_comm_hook(muster::comm_hooks::PowerSgd({.matrix_approximation_rank = 2}));
//
// Hooks with a state are handles: copies share the state, so a program keeps one to save it (for exact resumption) or
// to read it. The states of PowerSgd and TopK are each rank's own.
//
// All ranks must register the same hook with the same options. Thread-safety: none.
#pragma once

#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>

#include "muster/parallel/comm_hook.h"

namespace muster::comm_hooks {

// The average, as without a hook.
HookFuture all_reduce(GradBucket& bucket);
// Each rank keeps its own gradients, without any communication: to see what that costs.
HookFuture noop(GradBucket& bucket);

// The average of gradients that travel with 16 bits; each is divided by the number of ranks first. A float16 number is
// infinite above 65504.
HookFuture fp16_compress(GradBucket& bucket);
HookFuture bf16_compress(GradBucket& bucket);
// The same around another hook, which gets a bucket with 16 bits.
CommHook fp16_compress_wrapper(CommHook hook);
CommHook bf16_compress_wrapper(CommHook hook);

struct QuantizeOptions {
  int64_t elements_per_scale = 0;  // of a bucket; 0: all. Fewer: more exact, and 5 bytes more per scale
};
// The average of gradients that travel with 8 bits: each rank gets every other rank's, so use it for few ranks. Source:
// torch's quantization_pertensor_hook (0) and quantization_perchannel_hook (512), which send scales before gradients.
CommHook quantize(QuantizeOptions options = {});

struct PowerSgdOptions {
  int64_t matrix_approximation_rank = 1;  // above 0: columns of the two factors
  int64_t start_iter = 1000;              // averages without compression before, because early gradients matter most
  double min_compression_rate = 2;        // a gradient that becomes smaller by less is averaged as it is
  bool use_error_feedback = true;         // what compression loses is added to the next step's gradient
  bool warm_start = true;                 // begins with the last step's factors
  double orthogonalization_epsilon = 0;   // added to a column's norm; for gradients that may be zero
  uint64_t random_seed = 0;
  // true: the whole bucket is compressed as one square matrix. Faster, and less exact.
  bool batched = false;
};

// Sends two thin factors of each gradient instead of the gradient. Source: Vogels, Karimireddy, Jaggi, "PowerSGD:
// Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019; torch's powerSGD_hook and
// batched_powerSGD_hook. State belongs to parameters, so it is kept when buckets are laid out anew after the first
// step. A step with infinite gradients, which a GradScaler skips, leaves the state as it is.
class PowerSgd {
 public:
  explicit PowerSgd(PowerSgdOptions options = {});
  HookFuture operator()(GradBucket& bucket) const;

  struct Statistics {  // of elements, since the beginning
    int64_t before = 0, after = 0;
  };
  Statistics compression() const;
  int64_t iter() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

struct TopKOptions {
  double ratio = 0.01;  // above 0, at most 1: of each bucket's elements, those of the largest absolute values
  int64_t start_iter = 0;
  bool use_error_feedback = true;
};

// Sends the largest elements of each bucket, with their places. Source: Aji, Heafield, "Sparse Communication for
// Distributed Gradient Descent", EMNLP 2017; Lin et al., "Deep Gradient Compression", ICLR 2018.
class TopK {
 public:
  explicit TopK(TopKOptions options = {});
  HookFuture operator()(GradBucket& bucket) const;
  int64_t iter() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

struct PostLocalSgdOptions {
  int64_t start_local_sgd_iter = 1000;
  Group subgroup;                              // averages among these ranks from then on, for example those of one host
  bool post_local_gradient_all_reduce = true;  // false: no communication from then on
};

// Averages over all ranks at first, later within subgroups only. Use it with a ModelAverager
// (model_averager.h). Source: Lin et al., "Don't
// Use Large Mini-Batches, Use Local SGD", ICLR 2020; torch's post_localSGD_hook.
class PostLocalSgd {
 public:
  explicit PostLocalSgd(PostLocalSgdOptions options);
  HookFuture operator()(GradBucket& bucket) const;
  int64_t iter() const;
  void save(torch::serialize::OutputArchive& archive) const;
  void load(torch::serialize::InputArchive& archive);

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace muster::comm_hooks
