// Trains a convolutional network on Fashion-MNIST, on one process or many:
//
//   muster run -n 2 fashion_mnist
//
// The lines with muster:: in run() make it distributed. Every rank runs the same program on its share of each batch.
// elastic.cpp has the same training for ranks that come and go.
#include <muster/muster.h>
#include <muster/train/progress.h>
#include <torch/data/dataloader.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <algorithm>
#include <iostream>
#include <optional>
#include <string>

#include "elastic.h"
#include "evaluate.h"
#include "flags.h"
#include "history.h"
#include "images.h"
#include "nets.h"
#include "one_cycle.h"

namespace {

using torch::nn::functional::cross_entropy;

void run(const Flags& flags) {
  std::optional<muster::StopSignal> stop;  // catches a SIGTERM that comes before the Snapshot exists
  if (!flags.snapshot.empty()) stop.emplace();
  auto world = muster::init();
  check(flags, world);
  share_cores(world);

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
  History history;
  history.join(world);

  // Resumes where an earlier run was stopped or died.
  std::optional<muster::Snapshot> snapshot;
  int64_t step = 0;
  if (!flags.snapshot.empty()) {
    snapshot.emplace(muster::SnapshotOptions{.folder = flags.snapshot, .every = flags.every});
    snapshot->add("model", net).add("optimizer", sgd).add("schedule", schedule);
    snapshot->add("sampler", sampler).add("history", history);
    step = snapshot->restore();
    if (snapshot->stop_here(step)) return;
    bar.advance(std::min(step * flags.batch, flags.epochs * static_cast<int64_t>(sampler.size()) * world.world_size()));
  }
  // After a snapshot of an epoch's last step, the loop enters that epoch again: its end is still missing.
  for (auto epoch = static_cast<int>(std::max<int64_t>(step - 1, 0) / steps); epoch < flags.epochs; ++epoch) {
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
      if (snapshot && snapshot->step(++step)) return;  // asked to stop, and saved
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
    const Flags flags = parse_flags(argc, argv);
    flags.elastic ? run_elastic(flags) : run(flags);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "fashion_mnist: " + std::string(error.what_without_backtrace()) + "\n";
  } catch (const std::exception& error) {
    std::cerr << "fashion_mnist: " + std::string(error.what()) + "\n";
  }
  return 1;
}
