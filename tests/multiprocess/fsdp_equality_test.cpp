// FullyShardedDataParallel beside one process: losses, parameters and buffers, with both strategies, on 1 to 4 ranks.
#include <c10/core/DefaultDtype.h>
#include <gtest/gtest.h>

#include "multiprocess/fsdp_support.h"
#include "support/full_run.h"
#include "support/models.h"
#include "support/sanitized.h"

namespace muster::test {
namespace {

// While it lives, modules and random numbers are made in another dtype. It is the process's, so all ranks see it.
class DefaultDtype {
 public:
  explicit DefaultDtype(torch::ScalarType dtype) { torch::set_default_dtype(c10::scalarTypeToTypeMeta(dtype)); }
  DefaultDtype(const DefaultDtype&) = delete;
  DefaultDtype& operator=(const DefaultDtype&) = delete;
  ~DefaultDtype() { torch::set_default_dtype(before_); }

 private:
  const caffe2::TypeMeta before_ = torch::get_default_dtype();
};

// Frozen, unused, shared and empty parameters; all ranks use the same ones in a step, as kFullShard needs.
struct MixedAlike : Mixed {
  Tensor forward(int rank, int step) {
    Tensor y = again(torch::relu(body(frozen(drawn(rank, step, {5, 64})))));
    if (step % 4 < 2) y = y + sometimes(y);
    return y.square().mean() + empty.sum();
  }
};

const std::vector<HostOfRank> kHosts = {{"a"}, {"a", "b"}, {"a", "a", "b"}, {"a", "b", "b", "a"}};

// Of how far training has moved a parameter, and of a loss.
double apart(torch::ScalarType dtype) { return dtype == torch::kDouble ? 1e-12 : 1e-6; }

// One process, and then: each number of ranks on one host, whose parameters are shared, on several hosts with a copy
// each, and on several hosts that gather.
template <typename Net>
void expect_one_process(torch::ScalarType dtype, How how, const std::vector<HostOfRank>& all = kHosts) {
  SCOPED_TRACE(torch::toString(dtype));
  const DefaultDtype guard(dtype);
  for (const HostOfRank& hosts : all) {
    SCOPED_TRACE(testing::PrintToString(hosts));
    how.tolerance.apart = apart(dtype);
    how.hosts = HostOfRank(hosts.size(), "host");
    expect_as_alone<FullyShardedDataParallel, Net>(how);
    if (hosts.size() == 1) continue;
    how.hosts = hosts;
    const auto alone = train_alone<Net>(how);
    expect_as<FullyShardedDataParallel>(alone, how);
    expect_as<FullyGathered>(alone, how);
  }
}

TEST(FsdpEquality, ASmallModelInDoubles) {
  expect_one_process<MixedAlike>(torch::kDouble, {.rate = 0.5, .find_unused_parameters = true}, {{"a", "b"}});
}

TEST(FsdpEqualityLong, TransformerInFloats) { expect_one_process<Transformer>(torch::kFloat, {.steps = 50}); }
TEST(FsdpEqualityLong, TransformerInDoubles) { expect_one_process<Transformer>(torch::kDouble, {.steps = 50}); }
TEST(FsdpEqualityLong, LstmInFloats) { expect_one_process<Recurrent>(torch::kFloat, {.rate = 0.5, .steps = 50}); }
TEST(FsdpEqualityLong, LstmInDoubles) { expect_one_process<Recurrent>(torch::kDouble, {.rate = 0.5, .steps = 50}); }
TEST(FsdpEqualityLong, FrozenUnusedAndSharedInFloats) {
  expect_one_process<MixedAlike>(torch::kFloat, {.rate = 0.5, .find_unused_parameters = true, .steps = 50});
}
TEST(FsdpEqualityLong, FrozenUnusedAndSharedInDoubles) {
  expect_one_process<MixedAlike>(torch::kDouble, {.rate = 0.5, .find_unused_parameters = true, .steps = 50});
}
// One step takes as long as twenty of the transformer.
constexpr int kStepsOfResNet = kSanitized ? 5 : 50;
TEST(FsdpEqualityLong, ResNet18InFloats) {
  expect_one_process<ResNet18>(torch::kFloat, {.rate = 0.05, .steps = kStepsOfResNet});
}
const std::vector<HostOfRank> kFewRanks(kHosts.begin(), kHosts.begin() + 2),
    kMoreRanks(kHosts.begin() + 2, kHosts.end());
TEST(FsdpEqualityLong, ResNet18InDoublesOnFewRanks) {
  expect_one_process<ResNet18>(torch::kDouble, {.rate = 0.05, .steps = kStepsOfResNet}, kFewRanks);
}
TEST(FsdpEqualityLong, ResNet18InDoublesOnMoreRanks) {
  expect_one_process<ResNet18>(torch::kDouble, {.rate = 0.05, .steps = kStepsOfResNet}, kMoreRanks);
}

}  // namespace
}  // namespace muster::test
