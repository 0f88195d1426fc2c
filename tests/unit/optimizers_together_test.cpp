// The optimizers for training loops together with what else a loop has: DistributedDataParallel, a schedule, a scaler.
#include <ATen/ops/allclose.h>
#include <ATen/ops/cos.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <memory>

#include "base/text.h"
#include "muster/comm/world.h"
#include "muster/optim/grad_scaler.h"
#include "muster/optim/lr_scheduler.h"
#include "muster/parallel/ddp.h"
#include "unit/optimizers_fixture.h"

namespace muster::test::optimizers {
namespace {

struct Matrices : torch::nn::Module {
  Matrices() {
    size_t i = 0;
    for (const Tensor& each : start(at::kDouble)) register_parameter(text("w", i++), each.detach().clone());
  }
  Tensor forward(int rank, int step) const {
    Tensor loss = at::zeros({}, at::kDouble);
    double factor = 0.5;
    for (const Tensor& each : parameters()) loss = loss + at::cos(each * 3 + 0.3 * step + rank).sum() * (factor += 1);
    return rank == 1 && step == 3 ? loss * INFINITY : loss;
  }
};

// Two ranks, or one process that takes the mean of their losses. In one step a gradient of one rank is infinite.
TEST(Optimizers, InDdpWithAScheduleAndAScaler) {
  for_each_optimizer([]<typename O>(std::type_identity<O>, const std::string& name, const auto& options) {
    const auto train = [&](Matrices& net, const std::function<Tensor(int step)>& loss) {
      TorchOptimizer<O> optimizer(net.parameters(), options);
      GradScaler scaler({.init_scale = 1024});
      optim::LinearLR schedule(optimizer, 0.25, 1, 5);
      for (int step = 0; step < 8; ++step) {
        optimizer.zero_grad();
        scaler.scale(loss(step)).backward();
        EXPECT_EQ(scaler.step(optimizer), step != 3);
        scaler.update();
        schedule.step();
      }
      EXPECT_EQ(scaler.get_scale(), 512);
      EXPECT_DOUBLE_EQ(optimizer.param_groups()[0].options().get_lr(), options.lr);
    };
    const auto alone = std::make_shared<Matrices>();
    train(*alone, [&](int step) { return (alone->forward(0, step) + alone->forward(1, step)) / 2; });
    run_threads(2, [&](World& world) {
      const auto net = std::make_shared<Matrices>();
      DistributedDataParallel<Matrices> ddp(net);
      train(*net, [&](int step) { return ddp(world.rank(), step); });
      for (size_t i = 0; i < 3; ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], alone->parameters()[i], 1e-10, 1e-12)) << name << " " << i;
    });
    EXPECT_FALSE(at::allclose(alone->parameters()[0], start(at::kDouble)[0])) << name;
  });
}

}  // namespace
}  // namespace muster::test::optimizers
