#include "elastic.h"

#include <muster/muster.h>
#include <muster/train/elastic.h>
#include <muster/train/progress.h>
#include <torch/data/dataloader.h>
#include <torch/nn/functional/loss.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>
#include <torch/utils.h>

#include <iostream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>

#include "evaluate.h"
#include "history.h"
#include "images.h"
#include "nets.h"
#include "one_cycle.h"

namespace {

// Everything that a new rank needs from the ranks that are already there.
class DemoState : public muster::elastic::State {
 public:
  DemoState(torch::nn::Module& net, torch::optim::Optimizer& optimizer, OneCycle& schedule, History& history)
      : training_(net, optimizer), schedule_(schedule), history_(history) {}

  std::string save() const override {
    torch::serialize::OutputArchive archive, schedule, history;
    archive.write("training", torch::IValue(training_.save()));
    schedule_.save(schedule);
    archive.write("schedule", schedule);
    history_.save(history);
    archive.write("history", history);
    std::ostringstream bytes;
    archive.save_to(bytes);
    return std::move(bytes).str();
  }
  void load(const std::string& bytes) override {
    torch::serialize::InputArchive archive, schedule, history;
    archive.load_from(bytes.data(), bytes.size());
    torch::IValue training;
    archive.read("training", training);
    training_.load(training.toStringRef());
    archive.read("schedule", schedule);
    schedule_.load(schedule);
    archive.read("history", history);
    history_.load(history);
  }

 private:
  muster::elastic::TrainingState training_;
  OneCycle& schedule_;
  History& history_;
};

}  // namespace

void run_elastic(const Flags& flags) {
  Images train_images(flags.data, muster::FashionMnistPart::kTrain, flags.limit);
  Images test_images(flags.data, muster::FashionMnistPart::kTest, flags.limit);
  torch::manual_seed(flags.seed);
  auto net = make_net(flags.net);
  torch::optim::SGD sgd(net->parameters(),
                        torch::optim::SGDOptions(flags.lr).momentum(0.9).nesterov(true).weight_decay(5e-4));
  // A step is one batch over all ranks, whatever their number.
  const auto images = static_cast<int64_t>(*train_images.size());
  const int64_t steps = images / flags.batch;
  if (steps == 0) throw muster::InvalidArgument("there are fewer images than in one batch", "Give a smaller --batch");
  OneCycle schedule(sgd, flags.lr, flags.epochs * steps);
  History history(true);
  DemoState state(*net, sgd, schedule, history);
  muster::elastic::Options options;
  if (!flags.snapshot.empty()) options.snapshot = {.folder = flags.snapshot, .every = flags.every};
  int rank = 0;

  // Called for each World. Sets what depends on the ranks in it.
  const auto setup = [&](muster::World& world) -> muster::elastic::Step {
    check(flags, world);
    share_cores(world);
    history.join(world);
    rank = world.rank();
    struct OfWorld {
      OfWorld(const Images& train, const Images& test, const torch::nn::Sequential& net, const Flags& flags, int ranks)
          : sampler(*train.size(), {.seed = flags.seed, .drop_last = true}),
            loader(torch::data::make_data_loader(train, sampler, flags.batch / ranks)),
            test_loader(torch::data::make_data_loader(
                test, muster::DistributedSampler(*test.size(), {.shuffle = false, .pad = false}), 500)),
            ddp(net),
            bar(flags.epochs * static_cast<int64_t>(*train.size()) / flags.batch * flags.batch) {}
      muster::DistributedSampler sampler;
      decltype(torch::data::make_data_loader(std::declval<Images>(), sampler, 1)) loader;
      decltype(torch::data::make_data_loader(std::declval<Images>(), sampler, 1)) test_loader;
      muster::DistributedDataParallel<torch::nn::SequentialImpl> ddp;
      muster::Progress bar;
      std::optional<decltype(loader->begin())> next;
    };
    const auto own = std::make_shared<OfWorld>(train_images, test_images, net, flags, world.world_size());
    own->bar.advance(state.step() * flags.batch);
    return [&, own, batch_size = flags.batch / world.world_size(), seat = world.rank()] {
      const int64_t step = state.step(), epoch = step / steps, place = step % steps;
      if (!own->next || place == 0) {
        own->bar.set_label("epoch " + std::to_string(epoch + 1) + "/" + std::to_string(flags.epochs));
        own->sampler.seek(static_cast<uint64_t>(epoch), static_cast<size_t>(place * batch_size));
        own->next = own->loader->begin();
        net->train();
        history.begin_epoch();
      }
      torch::manual_seed(flags.seed + static_cast<uint64_t>(step * 4096 + seat));
      auto& batch = **own->next;
      sgd.zero_grad();
      auto output = own->ddp.forward(batch.data);
      auto loss = torch::nn::functional::cross_entropy(output, batch.target);
      loss.backward();
      sgd.step();
      schedule.step();
      history.step(output, batch.target, loss.item<double>());
      own->bar.advance(flags.batch, loss.item<double>());
      if (place + 1 < steps) {
        ++*own->next;
        return true;
      }
      own->next.reset();
      history.end_epoch();
      history.test(evaluate(net, *own->test_loader));
      if (epoch + 1 < flags.epochs) return true;
      own->bar.finish();
      return false;
    };
  };
  if (!muster::elastic::run(state, setup, options) || rank != 0) return;
  history.write_curves(flags);
  if (!flags.json.empty()) history.write_json(flags);
  std::cout << history.table(flags) << std::flush;
}
