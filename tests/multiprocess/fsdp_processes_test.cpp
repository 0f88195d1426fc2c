// FullyShardedDataParallel on ranks that are processes: what crosses between hosts, and what a fork() shares.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "multiprocess/fsdp_support.h"
#include "support/received_bytes.h"

namespace muster::test {
namespace {

// How often the bytes of all parameters come to a host in a step, whatever the number of its ranks. With two hosts a
// gradient is summed on each, and the sum comes once. With kFullShard a host lacks half of the parameters; it gets them
// before forward() uses them, and those that have gone since again before backward() does.
TEST(FsdpProcess, EachByteComesToAHostOnce) {
  struct Way {
    FsdpOptions options;
    double least, most;
  };
  for (const Way& way : {Way{{}, 0.95, 1.05}, Way{full({.is_unit = is_linear}), 1.0, 1.55},
                         Way{full({.is_unit = is_linear, .reshard_after_forward = false}), 0.95, 1.05}}) {
    const auto ends = in_processes({"a", "a", "b", "b"}, [&](World& world) {
      const auto net = make<Chain>(7, {});
      auto model = fully_shard(net, way.options);
      torch::optim::SGD optimizer(net->parameters(), 1e-3);
      int64_t came = 0;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model.synchronize();
        const int64_t before = bytes_received();
        model(drawn(world.rank(), step, {4, 256})).square().sum().backward();
        optimizer.step();
        model.synchronize();
        came = bytes_received() - before;
      }
      const Tensor all = torch::empty({4}, torch::kLong);
      all_gather_into_tensor(all, torch::full({1}, came, torch::kLong));
      const double parameters = Chain::kLayers * 256 * 256 * 4;
      for (int host = 0; host < 2; ++host) {
        const double share = all.slice(0, 2 * host, 2 * host + 2).sum().item<double>() / parameters;
        EXPECT_GE(share, way.least);
        EXPECT_LE(share, way.most);
      }
      return std::string("done");
    });
    for (const auto& end : ends) EXPECT_EQ(end.said, "done");
  }
}

// The parameters are the same memory in a child and in all ranks, whoever writes; what is a rank's own, such as the
// optimizer's states, is copied when one of the two writes.
TEST(FsdpProcess, AForkedChildSharesTheParametersOnly) {
  const auto ends = in_processes({"a", "a"}, [](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = fully_shard(net);
    torch::optim::AdamW optimizer(net->parameters());
    model(fsdp_input(world.rank(), 0)).square().sum().backward();
    optimizer.step();
    model.synchronize();
    const Tensor weight = net->b->weight.detach();
    if (model.owner(net->b->weight) == world.rank()) {
      const Tensor average =
          static_cast<torch::optim::AdamWParamState&>(*optimizer.state().at(net->b->weight.unsafeGetTensorImpl()))
              .exp_avg();
      const float before = average[0][0].item<float>();
      auto* const of_weight = weight.mutable_data_ptr<float>();
      auto* const of_average = average.mutable_data_ptr<float>();
      const pid_t child = ::fork();
      if (child == 0) {
        of_weight[0] = 42;
        of_average[0] = 43;
        ::_exit(0);
      }
      int status = -1;
      EXPECT_EQ(::waitpid(child, &status, 0), child);
      EXPECT_EQ(status, 0);
      EXPECT_EQ(of_average[0], before);
      of_weight[1] = 44;  // the pages that the child had, too, are still those of all ranks
    }
    model.synchronize();
    EXPECT_EQ(weight[0][0].item<float>(), 42);
    EXPECT_EQ(weight[0][1].item<float>(), 44);
    barrier();
    return std::string("done");
  });
  for (const auto& end : ends) EXPECT_EQ(end.said, "done");
}

}  // namespace
}  // namespace muster::test
