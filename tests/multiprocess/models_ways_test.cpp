// The models of support/models.h, trained by DistributedDataParallel in each of its ways: with communication hooks,
// with the watch for divergence, with delayed gradients, within join(), with activation checkpoints.
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "muster/parallel/activation_checkpoint.h"
#include "muster/parallel/comm_hooks.h"
#include "support/models.h"

namespace muster::test {
namespace {

struct Variant {
  std::string name;
  DdpOptions options = {};
  std::function<CommHook()> hook = nullptr;  // of each rank
  double apart = 1e-6;                       // of how far a parameter moves
  bool joins = false;
  std::optional<ActivationCheckpointOptions> checkpoint = {};  // of each block
};

// A gradient that was rounded may switch a ReLU in the next step. Without the average, the difference would be about 1.
constexpr double kSwitched = 0.25;

// Sums of two contributions have the same bits in any order. What a hook makes of them says `apart`.
std::vector<Variant> variants(const std::string& late, bool small_matrices, bool normalizes, bool has_blocks) {
  constexpr double kBytes = 1.0 / (1 << 20);
  std::vector<Variant> all = {
      {.name = "small buckets", .options = {.bucket_cap_mb = 400 * kBytes, .first_bucket_cap_mb = 100 * kBytes}},
      {.name = "static graph", .options = {.static_graph = true}},
      {.name = "watched", .options = {.check_divergence_every = 1}},
      {.name = "delayed", .options = {.delay_all_reduce = {late}}},
      {.name = "joined", .joins = true},
      {.name = "hook all_reduce", .hook = [] { return CommHook(comm_hooks::all_reduce); }},
      {.name = "hook of local SGD, before it begins",
       .hook = [] { return CommHook(comm_hooks::PostLocalSgd({.start_local_sgd_iter = 100})); }},
      {.name = "hook of all elements", .hook = [] { return CommHook(comm_hooks::TopK({.ratio = 1})); }},
  };
  if (!normalizes)  // by the few pictures of a batch, which amplifies a rounding more and more
    all.push_back(
        {.name = "hook bf16", .hook = [] { return CommHook(comm_hooks::bf16_compress); }, .apart = kSwitched});
  if (small_matrices)  // of full rank; what small singular values lose comes a step later, by the feedback
    all.push_back({.name = "hook PowerSGD of full rank",
                   .hook =
                       [] {
                         return CommHook(comm_hooks::PowerSgd(
                             {.matrix_approximation_rank = 1536, .start_iter = 0, .min_compression_rate = 0}));
                       },
                   .apart = 0.1});
  if (has_blocks)  // the ranks are threads of one process with one generator, and nothing is drawn
    for (const bool reentrant : {false, true})
      all.push_back({.name = reentrant ? "reentrant checkpoints" : "checkpoints",
                     .checkpoint = {{.preserve_rng_state = false, .reentrant = reentrant}}});
  return all;
}

// Each way equals one process that takes the ranks' parts one after the other.
template <typename Net>
void expect_every_way(double rate, const std::string& late, bool small_matrices, bool normalizes = false) {
  const int steps = full_run() ? 10 : 3;
  const Alone<Net> alone = train_alone<Net>({.rate = rate, .steps = steps});
  constexpr bool kHasBlocks = requires(Net & net) { net.call_block; };
  for (const Variant& variant : variants(late, small_matrices, normalizes, kHasBlocks)) {
    SCOPED_TRACE(variant.name);
    run_threads(kRanks,
                [&](World& world) {
                  const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {});
                  if constexpr (kHasBlocks)
                    if (variant.checkpoint)
                      net->call_block = [&](const auto& block, const Tensor& x) {
                        return activation_checkpoint(*variant.checkpoint, block, x);
                      };
                  DistributedDataParallel<Net> ddp(net, variant.options);
                  if (variant.hook) ddp.register_comm_hook(variant.hook());
                  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
                  const auto train = [&] {
                    for (int step = 0; step < steps; ++step) {
                      optimizer.zero_grad();
                      ddp(world.rank(), step).backward();
                      optimizer.step();
                    }
                  };
                  if (variant.joins)
                    ddp.join(train);
                  else
                    train();
                  expect_close(*net, *alone.net, alone.before, {.apart = variant.apart});
                  // join() ends with one rank's buffers on all; a block's second call updates statistics once more.
                  if (variant.apart <= 1e-6 && !variant.joins && !variant.checkpoint)
                    expect_equal_buffers(*net, alone.buffers[static_cast<size_t>(world.rank())]);
                },
                {.timeout = kPatience});
  }
}

TEST(Models, TransformerInEveryWay) { expect_every_way<Transformer>(0.05, "table.weight", true); }
TEST(Models, TwoLayersOfLstmInEveryWay) { expect_every_way<Recurrent>(0.5, "last.weight", true); }
TEST(Models, WideConvolutionsInEveryWay) { expect_every_way<WideConvolutions>(1e-3, "second.weight", false); }
TEST(Models, ResNet18InEveryWay) { expect_every_way<ResNet18>(0.05, "layers.0.weight", false, true); }

}  // namespace
}  // namespace muster::test
