// Trains a convolutional network on Fashion-MNIST, on one process or many:
//
//   muster run -n 2 fashion_mnist
//
// What makes it distributed are the lines with muster:: in run(). Every rank runs the same program on its share of each
// batch.
#include <muster/muster.h>
#include <muster/train/progress.h>
#include <torch/data/dataloader.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>
#include <unistd.h>

#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>

#include "flags.h"
#include "history.h"
#include "images.h"
#include "nets.h"
#include "one_cycle.h"

namespace {

using torch::nn::functional::cross_entropy;

// The test images are split over the ranks, none is counted twice, and every rank gets the score of all.
template <typename Loader>
Score evaluate(torch::nn::Sequential& net, Loader& loader) {
  torch::NoGradGuard no_grad;
  net->eval();
  Tally tally;
  for (auto& batch : loader) {
    const auto output = net->forward(batch.data);
    tally.add(output, batch.target, cross_entropy(output, batch.target).template item<double>());
  }
  return tally.score();
}

// What would fail only after the training, found before it.
void check(const Flags& flags, const muster::World& world) {
  const int ranks = world.world_size();
  if (flags.batch % ranks != 0) {
    throw muster::InvalidArgument(
        "a batch of " + std::to_string(flags.batch) + " images does not divide by " + std::to_string(ranks) + " ranks",
        "Give --batch a multiple of " + std::to_string(ranks));
  }
  if (world.rank() != 0) return;
  for (const auto& file : {flags.out, flags.json}) {
    const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
    if (!file.empty() && ::access(folder.c_str(), W_OK) != 0) {
      throw muster::Unavailable("cannot write " + file.string() + ": its folder is not there or not writable",
                                "Make the folder or name another");
    }
  }
}

void run(const Flags& flags) {
  auto world = muster::init();
  check(flags, world);
  if (std::getenv("OMP_NUM_THREADS") == nullptr) {  // share the cores among the ranks of this host
    at::set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world.local_world_size()));
  }

  Images train_images(flags.data, muster::FashionMnistPart::kTrain, flags.limit);
  Images test_images(flags.data, muster::FashionMnistPart::kTest, flags.limit);
  muster::DistributedSampler sampler(*train_images.size(), {.seed = flags.seed});
  muster::DistributedSampler test_sampler(*test_images.size(), {.shuffle = false, .pad = false});
  const int64_t batch_size = flags.batch / world.world_size();
  auto loader = torch::data::make_data_loader(train_images, sampler, batch_size);
  auto test_loader = torch::data::make_data_loader(test_images, test_sampler, 500);

  torch::manual_seed(flags.seed);
  auto net = make_net(flags.net);
  muster::DistributedDataParallel ddp(net);
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(flags.lr).momentum(0.9).nesterov(true).weight_decay(5e-4));
  const int64_t steps = (static_cast<int64_t>(sampler.size()) + batch_size - 1) / batch_size;
  OneCycle schedule(sgd, flags.lr, flags.epochs * steps);

  muster::Progress bar(flags.epochs * static_cast<int64_t>(sampler.size()) * world.world_size());
  History history(world);
  for (int epoch = 0; epoch < flags.epochs; ++epoch) {
    bar.set_label("epoch " + std::to_string(epoch + 1) + "/" + std::to_string(flags.epochs));
    sampler.set_epoch(epoch);
    net->train();
    history.begin_epoch();
    for (auto& batch : *loader) {
      sgd.zero_grad();
      auto output = ddp.forward(batch.data);
      auto loss = cross_entropy(output, batch.target);
      loss.backward();
      sgd.step();
      schedule.step();
      history.step(output, batch.target, loss.item<double>());
      bar.advance(batch.target.numel() * world.world_size(), loss.item<double>());
    }
    history.end_epoch();
    history.test(evaluate(net, *test_loader));
  }
  bar.finish();

  if (world.rank() != 0) return;
  history.write_curves(flags);
  if (!flags.json.empty()) history.write_json(flags);
  std::cout << history.table(flags) << std::flush;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse_flags(argc, argv));
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "fashion_mnist: " + std::string(error.what_without_backtrace()) + "\n";
  } catch (const std::exception& error) {
    std::cerr << "fashion_mnist: " + std::string(error.what()) + "\n";
  }
  return 1;
}
