// Worker 0 trains. All workers compute the loss and its gradients, each for some rows of the batch. For worker 0 this
// looks like a call of a local function.
//
//   muster run -n 2 remote_train
#include <muster/remote/auto_init_rpc.h>
#include <muster/remote/on_rank.h>
#include <muster/remote/parallelize.h>
#include <muster/rpc/modules.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>
#include <tuple>
#include <vector>

namespace rpc = muster::rpc;

namespace {

// The tensors that tree() names are split by rows when a Batch is an argument.
struct Batch {
  torch::Tensor x, y;
  auto tree() { return std::tie(x, y); }
  MSGPACK_DEFINE(x, y);
};

torch::nn::Sequential build_net() {
  return torch::nn::Sequential(torch::nn::Linear(2, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
}

// What each worker computes for its rows. The model goes to all workers.
using LossAndGradients = std::tuple<torch::Tensor, std::vector<torch::Tensor>>;
LossAndGradients loss_of_rows(const rpc::ModuleState& model, const Batch& rows) {
  auto net = build_net();
  rpc::load(*net, model);
  const auto loss = torch::nn::functional::mse_loss(net->forward(rows.x), rows.y);
  loss.backward();
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : net->parameters()) gradients.push_back(parameter.grad());
  return {loss.detach(), gradients};
}

// Called like loss_of_rows. Splits the batch by rows, and returns the mean of the results.
const auto loss_and_gradients =
    muster::parallelize<&loss_of_rows>({.partitioner = muster::batch_partitioner, .reducer = muster::mean_reducer});

Batch make_batch(int64_t rows) {
  const auto x = torch::rand({rows, 2}) * 4 - 2;
  return {x, (x.select(1, 0) * x.select(1, 1)).unsqueeze(1)};
}

void train() {
  auto net = build_net();
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  double first = 0, last = 0;
  constexpr int kSteps = 300;
  for (int step = 0; step < kSteps; ++step) {
    const auto [loss, gradients] = loss_and_gradients(rpc::state_of(*net), make_batch(96));
    const auto parameters = net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mutable_grad() = gradients[i];
    optimizer.step();
    if (step < 20) first += loss.item<double>() / 20;
    if (step >= kSteps - 20) last += loss.item<double>() / 20;
  }
  std::printf("loss: %.3f at first, %.3f at last\n", first, last);
}

void serve() { std::printf("%s serves\n", muster::get_worker_name().c_str()); }

}  // namespace

int main() {
  muster::auto_init_rpc(
      [] {
        muster::rank_non_zero_only(serve)();
        muster::rank_zero_only(train)();
      },
      {.worker_init = [] {
        torch::manual_seed(7 + muster::get_rank());
        torch::set_num_threads(1);
      }});
}
