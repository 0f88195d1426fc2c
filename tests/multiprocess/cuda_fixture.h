// What the tests on a CUDA device have in common. All ranks are on one device, which NCCL allows if it takes them for
// ranks of several hosts (NCCL_HOSTID).
//
// Ranks are forked, and the parent never touches CUDA, because a process cannot use it after a fork.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/comm/world.h"
#include "support/forked.h"
#include "support/models.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::cuda {

using Tensors = std::vector<Tensor>;

inline const torch::Device kCuda(torch::kCUDA, 0);

class Cuda : public testing::Test {
 protected:
  void SetUp() override {
    if (::access("/dev/nvidiactl", F_OK) != 0) GTEST_SKIP() << "no NVIDIA device here";
  }
};

inline void begin_rank(int rank) {
  ::setenv("NCCL_HOSTID", text("host", rank).c_str(), 1);
  ::setenv("NCCL_SOCKET_IFNAME", "lo", 0);
}

inline void on_ranks(int n, const std::function<void(World&)>& body, WorldOptions options = {.backend = "nccl"}) {
  const ForkedJob job;
  options.timeout = kPatience;
  ForkedRanks ranks(n, [&](int rank) -> std::string {
    begin_rank(rank);
    World world = job.join(rank, n, options);
    const World::Scope scope(world);
    batches_on = kCuda;
    body(world);
    return "";
  });
  for (const auto& end : ranks.wait_all(patience()))
    EXPECT_TRUE(end.exited && end.status == 0) << "signal " << end.signal << ": " << end.said;
}
inline void alone(const std::function<void()>& body) {
  on_ranks(1, [&](World&) { body(); });
}

inline void expect_near(const Tensor& got, const Tensor& wanted, double tolerance, const std::string& what = "") {
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  const Tensor a = got.detach().to(torch::kCPU, torch::kDouble), b = wanted.detach().to(torch::kCPU, torch::kDouble);
  EXPECT_TRUE(torch::allclose(a, b, tolerance, tolerance)) << what << " is up to " << largest(a - b) << " apart";
}

struct Perceptron : nn::Module {
  Tensor forward(const Tensor& x) { return b(torch::tanh(a(x))); }
  nn::Linear a = register_module("a", nn::Linear(8, 600)), b = register_module("b", nn::Linear(600, 4));
};

}  // namespace muster::test::cuda
