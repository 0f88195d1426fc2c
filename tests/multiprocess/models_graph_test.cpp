// The models of support/models.h in doubles: second derivatives through DistributedDataParallel, and a ResNet-18 whose
// batch norms take their statistics of all ranks' batches. Each equals one process.
#include <torch/nn.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "muster/parallel/sync_batch_norm.h"
#include "support/models.h"

namespace muster::test {
namespace {

void expect_equal_gradients(const nn::Module& got, const nn::Module& wanted, double tolerance) {
  const auto expected = wanted.named_parameters();
  for (const auto& item : got.named_parameters()) {
    const Tensor &ours = item.value().grad(), &theirs = expected[item.key()].grad();
    ASSERT_TRUE(ours.defined() && theirs.defined()) << item.key();
    EXPECT_GT(largest(theirs), 0) << item.key();
    EXPECT_LE(largest(ours - theirs), tolerance * std::max(1.0, largest(theirs))) << item.key();
  }
}

// A loss, and the squares of its gradients.
template <typename Net>
Tensor with_penalty(const Net& net, const Tensor& loss) {
  Tensor all = loss;
  for (const Tensor& gradient : torch::autograd::grad({loss}, net.parameters(), {}, true, true))
    all = all + 0.1 * gradient.square().sum();
  return all;
}

template <typename Net>
void expect_penalties_as_alone() {
  const InDoubles doubles;
  const auto alone = make<Net>(7, {});
  for (int rank = 0; rank < kRanks; ++rank) (with_penalty(*alone, alone->forward(rank, 0)) / kRanks).backward();
  run_threads(kRanks,
              [&](World& world) {
                at::set_num_threads(1);
                const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {});
                DistributedDataParallel<Net> ddp(net);
                with_penalty(*net, ddp(world.rank(), 0)).backward();
                expect_equal_gradients(*net, *alone, 1e-10);
              },
              {.timeout = kPatience});
}

TEST(Models, PenaltiesOfATransformer) { expect_penalties_as_alone<Transformer>(); }
TEST(Models, PenaltiesOfAnLstm) { expect_penalties_as_alone<Recurrent>(); }
TEST(Models, PenaltiesOfWideConvolutions) { expect_penalties_as_alone<WideConvolutions>(); }

// One process takes the whole batch: the pictures of all ranks.
TEST(Models, ResNet18WithSynchronizedBatchNorms) {
  const InDoubles doubles;
  const auto alone = make<ResNet18>(7, {});
  std::vector<Tensor> pictures, labels;
  for (int rank = 0; rank < kRanks; ++rank) {
    pictures.push_back(drawn(rank, 0, {2, 3, 64, 64}));
    labels.push_back(words(rank, 0, {2}, 1000));
  }
  const Tensor whole = torch::cross_entropy_loss(alone->logits(torch::cat(pictures)), torch::cat(labels));
  whole.backward();
  run_threads(kRanks,
              [&](World& world) {
                at::set_num_threads(1);
                const auto net = make<ResNet18>(7 + static_cast<uint64_t>(world.rank()), {});
                convert_sync_batchnorm(*net);
                barrier();  // no rank runs a batch norm before
                DistributedDataParallel<ResNet18> ddp(net);
                ddp(world.rank(), 0).backward();
                expect_equal_gradients(*net, *alone, 1e-9);
                expect_equal_buffers(*net, copies(alone->named_buffers()), 1e-9);
              },
              {.timeout = kPatience});
}

}  // namespace
}  // namespace muster::test
