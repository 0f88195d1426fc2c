// A ResNet with synchronized batch norms, for pictures of the size of CIFAR's, or Fashion-MNIST:
//
//   muster run -n 2 parallel_resnet
//   muster run -n 2 parallel_resnet --data /usr/share/datasets/fashion-mnist --epochs 5 --folder run1
//
// A batch of 64 is 32 pictures for each of two ranks, or 16 for each of four. Each BatchNorm looks at the whole batch,
// so the losses are the same on any number of ranks that divides the batch and the pictures, but for rounding. The
// rate goes through one cycle, and averages of the parameters are kept. With --folder, the program may be killed at any
// time: it goes on from its last snapshot to the bit, and `muster ledger check run1/ledger` proves that no picture was
// lost or used twice.
// Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
#include <ATen/Parallel.h>
#include <muster/data/idx.h>
#include <muster/muster.h>
#include <muster/optim/lr_scheduler.h>
#include <muster/optim/optimizers.h>
#include <torch/data/datasets/base.h>
#include <torch/nn.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../curve.h"

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

struct Block : nn::Module {
  Block(int64_t in, int64_t out, int64_t stride)
      : first(register_module("first", convolution(in, out, 3, stride))),
        second(register_module("second", convolution(out, out, 3, 1))),
        first_norm(register_module("first_norm", nn::BatchNorm2d(out))),
        second_norm(register_module("second_norm", nn::BatchNorm2d(out))) {
    if (in != out) shortcut = register_module("shortcut", convolution(in, out, 1, stride));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = second_norm(second(torch::relu(first_norm(first(x)))));
    return torch::relu(y + (shortcut ? shortcut(x) : x));
  }
  nn::Conv2d first, second, shortcut{nullptr};
  nn::BatchNorm2d first_norm, second_norm;
};

// From pictures [n, channels, height, width] to [n, 10].
nn::Sequential resnet(int64_t channels, int64_t width) {
  nn::Sequential net(convolution(channels, width, 3, 1), nn::BatchNorm2d(width), nn::ReLU());
  for (const int64_t times : {1, 2, 4})
    net->push_back(std::make_shared<Block>(times == 1 ? width : width * times / 2, width * times, times == 1 ? 1 : 2));
  net->push_back(nn::AdaptiveAvgPool2d(1));
  net->push_back(nn::Flatten());
  net->push_back(nn::Linear(width * 4, 10));
  return net;
}

struct Batch {
  std::vector<size_t> samples;
  Tensor pictures, labels;
};

struct Pictures {
  Tensor pictures;  // [n, channels, height, width], float
  Tensor labels;    // [n]

  Batch operator()(const std::vector<size_t>& samples) const {
    const std::vector<int64_t> numbers(samples.begin(), samples.end());
    const Tensor rows = torch::tensor(numbers);
    return {samples, pictures.index_select(0, rows), labels.index_select(0, rows)};
  }
};

// Ten patterns of 4 by 4 fields, with noise.
Pictures patterns(int64_t count) {
  torch::manual_seed(5);
  const Tensor labels = torch::randint(10, {count});
  const Tensor fields = torch::randn({10, 3, 4, 4}).repeat_interleave(8, 2).repeat_interleave(8, 3);
  return {fields.index_select(0, labels) + torch::randn({count, 3, 32, 32}), labels};
}
Pictures fashion(const std::string& folder) {
  const auto data = muster::load_fashion_mnist(folder, muster::FashionMnistPart::kTrain);
  return {(data.images.unsqueeze(1).to(torch::kFloat) - 73) / 90, data.labels};
}

struct Settings {
  std::string data, folder, curve;
  int64_t epochs = 2, batch = 64, width = 16, pictures = 2048, every = 20;
  double rate = 0.1;
  bool bfloat16 = false;
};

void learn(const Settings& settings, const muster::World& world) {
  const Pictures all = settings.data.empty() ? patterns(settings.pictures) : fashion(settings.data);
  const auto size = static_cast<size_t>(all.labels.size(0));
  if (settings.batch % world.world_size() != 0 || all.labels.size(0) % world.world_size() != 0)
    throw muster::InvalidArgument("a batch of " + std::to_string(settings.batch) + " of " + std::to_string(size) +
                                      " pictures cannot be divided equally among " +
                                      std::to_string(world.world_size()) + " ranks",
                                  "Change --batch, --pictures or the number of ranks");
  torch::manual_seed(0);
  nn::Sequential net = resnet(all.pictures.size(1), settings.width);
  muster::convert_sync_batchnorm(net);
  muster::DdpOptions options;
  if (settings.bfloat16) options.mixed_precision.param_dtype = torch::kBFloat16;
  muster::DistributedDataParallel<nn::SequentialImpl> ddp(net, options);
  muster::SGD sgd(net->parameters(), {.lr = settings.rate, .momentum = 0.9, .weight_decay = 5e-4, .nesterov = true});
  muster::DistributedSampler sampler(size);
  const auto batch = static_cast<size_t>(settings.batch / world.world_size());
  muster::PrefetchLoader loader(all, sampler, {.batch_size = batch, .workers = 1});

  // A training that is to be killed and go on must know from the beginning how long it is.
  const auto steps = static_cast<int64_t>((sampler.size() + batch - 1) / batch) * settings.epochs;
  muster::optim::OneCycleLR schedule(sgd, {.max_lr = settings.rate, .total_steps = steps});
  muster::AveragedModel averages(net, {.decay = 0.9});

  int64_t step = 0;
  std::optional<muster::Snapshot> snapshot;
  std::optional<muster::Ledger> ledger;
  if (!settings.folder.empty()) {
    snapshot.emplace(muster::SnapshotOptions{.folder = settings.folder, .every = settings.every, .asynchronous = true});
    snapshot->add("net", net).add("sgd", sgd).add("loader", loader).add("schedule", schedule).add("averages", averages);
    step = snapshot->restore();
    ledger.emplace(settings.folder + "/ledger", muster::LedgerOptions{.dataset_size = size, .steps = step});
  }
  std::vector<double> losses;
  for (auto epoch = static_cast<int64_t>(sampler.epoch()); epoch < settings.epochs; ++epoch) {
    sampler.set_epoch(static_cast<uint64_t>(epoch));
    for (const auto& [samples, pictures, labels] : loader) {
      if (ledger) ledger->enter(static_cast<uint64_t>(epoch), samples);
      sgd.zero_grad();
      const Tensor loss = F::cross_entropy(ddp(pictures).to(torch::kFloat), labels);
      loss.backward();
      sgd.step();
      if (ledger) ledger->step();
      schedule.step();
      averages.update();
      Tensor mean = loss.detach().clone();
      muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
      losses.push_back(mean.item<double>());
      if (snapshot && snapshot->step(++step)) return;
    }
  }
  if (world.rank() != 0 || losses.empty()) return;
  std::printf("loss: %.4f at first, %.4f at last\n", losses.front(), losses.back());
  {
    const auto averaged = averages.in_use();
    const torch::NoGradGuard no_grad;
    const Batch some = all({0, 1, 2, 3, 4, 5, 6, 7});
    net->eval();
    std::printf("loss of the averages: %.4f\n",
                F::cross_entropy(net->forward(some.pictures), some.labels).item<double>());
  }
  draw_curve(settings.curve, "ResNet with SyncBatchNorm", "loss of the whole batch", "loss", losses, "step");
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A ResNet with synchronized batch norms");
  app.add_option("--data", settings.data, "Fashion-MNIST; by default pictures of ten patterns with noise")
      ->type_name("FOLDER");
  app.add_option("--pictures", settings.pictures, "how many of these")->check(CLI::Range(64, 1 << 20));
  app.add_option("--epochs", settings.epochs, "over all pictures")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--batch", settings.batch, "pictures of all ranks together")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  app.add_option("--width", settings.width, "channels of the first block")
      ->check(CLI::Range(1, 512))
      ->capture_default_str();
  app.add_option("--rate", settings.rate, "learning rate")->capture_default_str();
  app.add_flag("--bfloat16", settings.bfloat16, "compute with copies of the parameters in bfloat16");
  app.add_option("--folder", settings.folder, "snapshots and the ledger")->type_name("FOLDER");
  app.add_option("--every", settings.every, "steps between snapshots")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  try {
    learn(settings, world);
    return 0;
  } catch (const muster::InvalidArgument& error) {
    std::fprintf(stderr, "parallel_resnet: %s\n", error.what());
    return 2;
  }
}
