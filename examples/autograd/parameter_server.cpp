// A parameter server, and three ways to train with it: synchronous, asynchronous, and asynchronous with a bound.
//
//   muster run -n 3 autograd_parameter_server --curve updates.svg
//
// Worker 0 has the model. Every other worker is a trainer with its own data. A step of a trainer is a remote call of
// the model, a loss, and backward in a context: the gradients stay on the server, which then makes its step.
//   synchronous   the server applies the mean of all trainers' gradients; the trainers wait for that
//   HogWild       the server applies each trainer's gradients immediately, whatever the others have changed meanwhile
//   bounded       the same, but no trainer is more than `--bound` steps ahead of the slowest
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <muster/autograd/context.h>
#include <muster/comm/world.h>
#include <muster/rpc/rref.h>
#include <muster/rpc/task.h>
#include <muster/train/plot.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace rpc = muster::rpc;
using at::Tensor;
using namespace std::chrono_literals;

namespace {

struct Settings {
  int steps = 100, bound = 2;
  double lr = 0.05;
  std::string curve;  // the picture, an SVG; empty: none
};

enum Way { kSynchronous, kHogWild, kBounded };
constexpr const char* kNames[] = {"synchronous", "HogWild", "bounded staleness"};

Tensor drawn(at::IntArrayRef sizes, int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return at::randn(sizes, generator, at::kDouble);
}

class Server {
 public:
  Server(int trainers, int way, int bound, double lr)
      : way_(way), bound_(bound), lr_(lr), steps_(static_cast<size_t>(trainers)) {
    weights_ = {drawn({4, 16}, 1) / 2, drawn({16, 1}, 2) / 4};
    for (Tensor& one : weights_) one.set_requires_grad(true);
  }

  // Uses copies of the weights: another trainer may change the weights before backward() needs them.
  Tensor forward(const Tensor& x) {
    const Tensor first = weights_[0].clone(), second = weights_[1].clone();
    return x.matmul(first).tanh().matmul(second);
  }

  // Makes a step with the gradients of the caller's context. It waits for others without holding a thread, so there may
  // be any number of trainers.
  rpc::Task<void> step(int trainer, double loss) {
    std::vector<Tensor> gradients;
    for (const Tensor& one : weights_) gradients.push_back(muster::autograd::gradient(one));
    std::unique_lock lock(mutex_);
    losses_.push_back(loss);
    const int mine = ++steps_[static_cast<size_t>(trainer)];
    if (way_ == kSynchronous) {
      if (sums_.empty()) sums_.resize(gradients.size());
      for (size_t i = 0; i < gradients.size(); ++i)
        sums_[i] = sums_[i].defined() ? sums_[i] + gradients[i] : gradients[i];
      if (slowest() == mine) {  // this trainer is the last one
        apply(sums_, lr_ / static_cast<double>(steps_.size()));
        sums_.clear();
      }
    } else {
      apply(gradients, lr_ / static_cast<double>(steps_.size()));
    }
    auto others = std::exchange(changed_, rpc::Promise<void>());
    lock.unlock();
    others.try_set_value();  // those that wait look again
    lock.lock();
    while (way_ == kSynchronous ? slowest() < mine : way_ == kBounded && mine - slowest() > bound_) {
      const auto changed = changed_.future();
      lock.unlock();
      co_await changed;
      lock.lock();
    }
  }

  std::vector<double> losses() {
    const std::lock_guard lock(mutex_);
    return losses_;
  }

 private:
  int slowest() const { return *std::min_element(steps_.begin(), steps_.end()); }
  void apply(const std::vector<Tensor>& gradients, double lr) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < weights_.size(); ++i) weights_[i].sub_(gradients[i], lr);
  }

  const int way_, bound_;
  const double lr_;
  std::vector<Tensor> weights_, sums_;
  std::mutex mutex_;
  rpc::Promise<void> changed_;  // kept by the next step
  std::vector<int> steps_;      // of each trainer
  std::vector<double> losses_;
};

void train(rpc::RRef<Server> server, int trainer, int steps) {
  const Tensor true_weights = drawn({4, 1}, 3);
  for (int step = 0; step < steps; ++step) {
    const Tensor x = drawn({32, 4}, 1000 * (trainer + 1) + step);
    const Tensor y = x.matmul(true_weights).tanh();
    muster::autograd::Context context;
    const Tensor loss = (server.sync<&Server::forward>(x) - y).square().mean();
    muster::autograd::backward(context, {loss});
    server.sync<&Server::step>(trainer, loss.item<double>());
  }
}

std::vector<double> smooth(const std::vector<double>& values, size_t of) {
  std::vector<double> means;
  for (size_t i = 0; i < values.size(); ++i) {
    const size_t from = i + 1 > of ? i + 1 - of : 0;
    means.push_back(std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(from),
                                    values.begin() + static_cast<std::ptrdiff_t>(i + 1), 0.0) /
                    static_cast<double>(i + 1 - from));
  }
  return means;
}

void compare(const Settings& settings) {
  const auto trainers = static_cast<int>(rpc::all_workers().size()) - 1;
  muster::Panel panel{.title = "loss", .x_label = "step of a trainer", .series = {}, .y_min = 0};
  for (const int way : {kSynchronous, kHogWild, kBounded}) {
    const auto server = std::make_shared<Server>(trainers, way, settings.bound, settings.lr);
    const auto rref = rpc::make_rref(server);
    std::vector<rpc::Future<void>> training;
    for (int i = 0; i < trainers; ++i)
      training.push_back(rpc::async<&train>({i + 1, {.timeout = 0ms}}, rref, int(i), settings.steps));
    rpc::when_all(std::move(training)).get();
    const std::vector<double> losses = smooth(server->losses(), 20);
    std::vector<double> steps(losses.size());
    for (size_t i = 0; i < steps.size(); ++i) steps[i] = static_cast<double>(i) / trainers;
    std::printf("%s: loss %.4f at first, %.4f at last\n", kNames[way], losses[std::min<size_t>(9, losses.size() - 1)],
                losses.back());
    panel.series.push_back({.name = kNames[way], .x = steps, .y = losses});
  }
  if (settings.curve.empty()) return;
  muster::write_svg(settings.curve, {.title = "Updates of a parameter server",
                                     .subtitle = "loss of the trainers' batches, mean of the last 20",
                                     .panels = {panel}});
  std::printf("the curve is in %s\n", settings.curve.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A parameter server, and three ways to update it");
  app.add_option("--steps", settings.steps, "steps per trainer")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--bound", settings.bound, "steps ahead of the slowest")->check(CLI::Range(0, 1000));
  app.add_option("--lr", settings.lr, "learning rate")->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the losses in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  rpc::init();
  if (world.rank() == 0 && world.world_size() > 1) compare(settings);
  rpc::shutdown();
}
