// Few-shot classification: a net that learns to tell five kinds of clothes apart from five pictures of each.
//
//   meta_few_shot --curve few_shot.svg               # one process
//   muster run -n 4 meta_few_shot                    # the tasks are spread over the workers
//
// It is trained on Fashion-MNIST's classes 0 to 4, whose numbers are shuffled anew in each task, and tested on the
// classes 5 to 9, which it has never seen. What MAML learns is where to begin: three inner steps from there are enough.
//
// C. Finn, P. Abbeel, S. Levine, "Model-Agnostic Meta-Learning for Fast Adaptation of Deep Networks", ICML 2017.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/data/idx.h>
#include <muster/optim/meta.h>
#include <muster/remote/auto_init_rpc.h>
#include <muster/remote/on_rank.h>
#include <muster/remote/remote_call.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "../curve.h"

namespace optim = muster::optim;
namespace nn = torch::nn;
using at::Tensor;

namespace {

constexpr int64_t kWays = 5, kShots = 5;

struct Net : nn::Module {
  nn::Conv2d first{nn::Conv2dOptions(1, 16, 3).stride(2)}, second{nn::Conv2dOptions(16, 16, 3).stride(2)};
  nn::Linear out{16 * 2 * 2, kWays};
  Net() {
    register_module("first", first);
    register_module("second", second);
    register_module("out", out);
  }
  Tensor forward(const Tensor& images) { return out(second(first(images).relu()).relu().flatten(1)); }
};

// A task has the shape [2, kWays * kShots, 196]: pictures to learn from and other ones, each sorted by class.
struct Result {
  Tensor loss, accuracy;
};
Result after_adapting(const optim::ModuleState& model, const Tensor& task, int steps) {
  Net net;
  optim::recover_state_dict(net, model);
  optim::MetaSGD inner(net, {.lr = 0.1});
  const Tensor classes = at::arange(kWays).repeat_interleave(kShots), images = task.view({2, -1, 1, 14, 14});
  const auto loss = [&](const Tensor& logits) { return nn::functional::cross_entropy(logits, classes); };
  for (int step = 0; step < steps; ++step) inner.step(loss(net.forward(images[0])));
  const Tensor logits = net.forward(images[1]);
  return {loss(logits), (logits.argmax(1) == classes).to(at::kFloat).mean()};
}
Tensor loss_after_adapting(optim::ModuleState model, Tensor task, int steps) {
  return after_adapting(model, task, steps).loss;
}
Tensor accuracy_after_adapting(optim::ModuleState model, Tensor task, int steps) {
  return after_adapting(model, task, steps).accuracy;
}

// Draws tasks from the classes first … first + 4 of Fashion-MNIST.
class Tasks {
 public:
  Tasks(const muster::FashionMnist& data, int64_t first) {
    const Tensor images = at::avg_pool2d(data.images.view({-1, 1, 28, 28}).to(at::kFloat) / 255 - 0.3, 2).flatten(1);
    for (int64_t i = first; i < first + kWays; ++i) of_class_.push_back(images.index({data.labels == i}));
  }
  Tensor draw(int64_t count, at::Generator& random) const {
    std::vector<Tensor> tasks;
    for (int64_t task = 0; task < count; ++task) {
      std::vector<Tensor> rows;
      const Tensor order = at::randperm(kWays, random);
      for (int64_t way = 0; way < kWays; ++way) {
        const Tensor& all = of_class_[static_cast<size_t>(order[way].item<int64_t>())];
        rows.push_back(all.index({at::randint(all.size(0), {2 * kShots}, random)}).view({2, kShots, -1}));
      }
      tasks.push_back(at::cat(rows, 1));
    }
    return at::stack(tasks);
  }

 private:
  std::vector<Tensor> of_class_;
};

struct Settings {
  int steps = 200, tasks = 8, inner_steps = 3;
  std::string data = "/usr/share/datasets/fashion-mnist", curve;
};

void train(const Settings& settings) {
  at::manual_seed(1);
  auto random = at::make_generator<at::CPUGeneratorImpl>(uint64_t{1});
  const auto data = muster::load_fashion_mnist(settings.data, muster::FashionMnistPart::kTest);
  const Tasks seen(data, 0), unseen(data, kWays);
  const Tensor test = unseen.draw(40, random);
  const auto one_task_each = muster::dim_partitioner(0, {.exclusive = true, .keepdim = false});
  Net net;
  const auto accuracy = [&] {
    return muster::remote_sync_call<&accuracy_after_adapting>(
               optim::extract_state_dict(net, {.by = optim::CopyMode::kDeepCopy}), test, settings.inner_steps,
               {one_task_each, muster::mean_reducer})
        .item<double>();
  };
  torch::optim::Adam adam(net.parameters(), 0.003);
  const double at_first = accuracy();
  std::vector<double> losses;
  for (int step = 0; step < settings.steps; ++step) {
    const Tensor loss = muster::remote_sync_call<&loss_after_adapting>(
        optim::extract_state_dict(net), seen.draw(settings.tasks, random), settings.inner_steps,
        {one_task_each, muster::mean_reducer});
    adam.zero_grad();
    loss.backward();
    adam.step();
    losses.push_back(loss.item<double>());
  }
  std::printf("accuracy on unseen classes: %.3f at first, %.3f at last\n", at_first, accuracy());
  draw_curve(settings.curve, "Five classes from five pictures each", "MAML on Fashion-MNIST, classes 0 to 4",
             "loss after adapting", losses);
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("Few-shot classification of Fashion-MNIST by MAML");
  app.add_option("--steps", settings.steps, "steps of the outer loop")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--tasks", settings.tasks, "tasks per step")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--inner-steps", settings.inner_steps, "steps on each task")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
  app.add_option("--data", settings.data, "folder of Fashion-MNIST's files")->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the loss in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  muster::auto_init_rpc([&] { muster::rank_zero_only(train)(settings); });
}
