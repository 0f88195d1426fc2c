// Data-parallel training by hand: each rank computes gradients on its part of the data, and the ranks average them
// before the step. DistributedDataParallel does this for you, while backward still runs.
//
//   muster run -n 2 tutorial_average_gradients [folder of Fashion-MNIST]
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>
#include <muster/data/idx.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>

namespace {

void average_gradients(torch::nn::Module& module) {
  for (const auto& parameter : module.parameters())
    muster::all_reduce(parameter.mutable_grad(), {.op = muster::ReduceOp::AVG});
}

}  // namespace

int main(int argc, char** argv) {
  auto world = muster::init();
  const auto data = muster::load_fashion_mnist(argc > 1 ? argv[1] : "/usr/share/datasets/fashion-mnist",
                                               muster::FashionMnistPart::kTrain);

  torch::manual_seed(1);  // the same parameters on all ranks
  torch::nn::Sequential net(torch::nn::Linear(784, 100), torch::nn::ReLU(), torch::nn::Linear(100, 10));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));

  constexpr int kSteps = 300, kBatch = 128;
  const int each = kBatch / world.world_size();
  double first = 0, last = 0;
  for (int step = 0; step < kSteps; ++step) {
    const int64_t begin = (static_cast<int64_t>(step) * kBatch + world.rank() * each) % (data.images.size(0) - kBatch);
    const auto x = data.images.narrow(0, begin, each).to(torch::kFloat).div_(255).flatten(1);
    const auto y = data.labels.narrow(0, begin, each);
    optimizer.zero_grad();
    const auto loss = torch::nn::functional::cross_entropy(net->forward(x), y);
    loss.backward();
    average_gradients(*net);
    optimizer.step();

    const auto mean = loss.detach().clone();
    muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
    if (step < 20) first += mean.item<double>() / 20;
    if (step >= kSteps - 20) last += mean.item<double>() / 20;
  }
  if (world.rank() == 0) std::printf("loss: %.3f at first, %.3f at last\n", first, last);
  muster::barrier();
}
