// A net in two halves on two workers. Each batch goes through them in parts, so that both halves work at the same time.
//
//   muster run -n 3 autograd_pipeline --splits 1,2,4,8 --curve pipeline.svg
//
// Worker 0 has the data and the loss; workers 1 and 2 have one half each. While the second half works at one part of a
// batch (a micro-batch), the first half works at the next. The output of the first half stays on its worker, and the
// second half fetches it from there: worker 0 only passes the reference on. Backward goes the same way automatically.
//
// Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <muster/autograd/context.h>
#include <muster/base/error.h>
#include <muster/comm/world.h>
#include <muster/data/idx.h>
#include <muster/optim/distributed_optimizer.h>
#include <muster/optim/functional_optimizer.h>
#include <muster/rpc/rref.h>
#include <muster/train/plot.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

namespace nn = torch::nn;
namespace rpc = muster::rpc;
namespace optim = muster::optim;
using at::Tensor;

namespace {

struct Settings {
  int steps = 40;
  int64_t batch = 128;
  std::vector<int> splits{1, 2, 4, 8};  // micro-batches per batch; the program trains with each and compares
  double lr = 0.01;
  std::string data = "/usr/share/datasets/fashion-mnist";
  bool check = false;  // computes in doubles: with floats, rounding may move a value across a ReLU's bend
  std::string curve;   // the picture, an SVG; empty: none
};

// --- the net ---

struct ResidualImpl : nn::Module {
  explicit ResidualImpl(int64_t channels)
      : first(nn::Conv2dOptions(channels, channels, 3).padding(1)),
        second(nn::Conv2dOptions(channels, channels, 3).padding(1)) {
    register_module("first", first);
    register_module("second", second);
  }
  Tensor forward(const Tensor& x) { return (x + second(first(x).relu())).relu(); }
  nn::Conv2d first, second;
};
TORCH_MODULE(Residual);

// There is no batch normalization, because its statistics would be those of a micro-batch. The halves cost about the
// same.
nn::Sequential make_half(int which, bool doubles) {
  at::manual_seed(static_cast<uint64_t>(1 + which));
  const auto convolution = [](int64_t from, int64_t to) {
    return nn::Conv2d(nn::Conv2dOptions(from, to, 3).padding(1));
  };
  nn::Sequential half = which == 0 ? nn::Sequential(convolution(1, 16), nn::ReLU(), Residual(16), nn::MaxPool2d(2))
                                   : nn::Sequential(convolution(16, 32), nn::ReLU(), Residual(32), nn::MaxPool2d(2),
                                                    nn::Flatten(), nn::Linear(32 * 7 * 7, 10));
  if (doubles) half->to(at::kDouble);
  return half;
}

// A time in which a half was at work, on the clock that all processes of a machine share.
struct Span {
  double begin = 0, end = 0;
  MSGPACK_DEFINE(begin, end);
};
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// Works at one micro-batch at a time, forward or backward, as a device would. Otherwise the first half would work at
// all micro-batches of a batch concurrently, and the second half would get nothing before the end.
class Half {
 public:
  Half(int which, bool doubles) : net_(make_half(which, doubles)) {}

  Tensor forward(const Tensor& x) {
    Turn turn;
    begin(turn);
    const Tensor y = net_->forward(x);
    end(turn);
    take_turns_backward(x, y);
    return y;
  }
  Tensor forward_of(const rpc::RRef<Tensor>& x) { return forward(x.to_here()); }  // fetches it from its owner

  std::vector<optim::ParameterRef> parameters() { return optim::parameter_rrefs(net_->parameters()); }
  std::vector<Span> spans() {
    const std::lock_guard lock(mutex_);
    return spans_;
  }

 private:
  struct Turn {
    std::unique_lock<std::mutex> lock;
    double since = 0;
  };
  void begin(Turn& turn) {
    turn.lock = std::unique_lock(mutex_);
    turn.since = now();
  }
  void end(Turn& turn) {
    if (!turn.lock) return;
    spans_.push_back({turn.since, now()});
    turn.lock.unlock();
  }

  // A turn of backward begins with the gradient of y. It ends with the gradient of x, which is then sent on, or with
  // the engine's run (even if that fails).
  void take_turns_backward(const Tensor& x, const Tensor& y) {
    const auto turn = std::make_shared<Turn>();
    y.register_hook([this, turn](const Tensor& gradient) {
      begin(*turn);
      const std::shared_ptr<void> at_the_end(nullptr, [this, turn](void*) { end(*turn); });
      torch::autograd::Engine::get_default_engine().queue_callback([at_the_end] {});
      return gradient;
    });
    if (x.requires_grad())
      x.register_hook([this, turn](const Tensor& gradient) {
        end(*turn);
        return gradient;
      });
  }

  nn::Sequential net_;
  std::mutex mutex_;
  std::vector<Span> spans_;
};

// --- training ---

struct Data {
  Tensor images, labels;

  Data batch(int step, int64_t size) const {
    const int64_t from = step * size % (labels.size(0) - size + 1);
    return {images.narrow(0, from, size), labels.narrow(0, from, size)};
  }
};

Data load(const Settings& settings) {
  const int64_t count = std::max<int64_t>(settings.batch, 10'000);
  try {
    const auto raw = muster::load_fashion_mnist(settings.data, muster::FashionMnistPart::kTrain);
    std::printf("data: Fashion-MNIST\n");
    return {((raw.images.narrow(0, 0, count).to(at::kFloat) / 255 - 0.2860) / 0.3530).unsqueeze(1),
            raw.labels.narrow(0, 0, count)};
  } catch (const muster::Unavailable&) {
    std::printf("data: made up, since %s has no Fashion-MNIST\n", settings.data.c_str());
    auto generator = at::make_generator<at::CPUGeneratorImpl>(uint64_t{7});
    const Tensor labels = at::randint(10, {count}, generator, at::kLong);
    const Tensor classes = at::randn({10, 1, 28, 28}, generator);
    return {classes.index_select(0, labels) + at::randn({count, 1, 28, 28}, generator) / 2, labels};
  }
}

class Pipeline {
 public:
  Pipeline(int splits, const Settings& settings)
      : splits_(splits),
        first_(rpc::remote<Half>(1, 0, settings.check)),
        second_(rpc::remote<Half>(2, 1, settings.check)),
        sgd_(sgd(settings)) {}

  void step(const Data& batch) {
    const double begin = now();
    const auto images = batch.images.chunk(splits_), labels = batch.labels.chunk(splits_);
    muster::autograd::Context context;
    std::vector<rpc::Future<Tensor>> outputs;
    for (const Tensor& part : images) {
      const rpc::RRef<Tensor> between = first_.remote<&Half::forward>(part);
      outputs.push_back(second_.async<&Half::forward_of>(between));
    }
    Tensor loss = at::zeros({});
    for (size_t i = 0; i < outputs.size(); ++i)
      loss = loss + at::cross_entropy_loss(outputs[i].get(), labels[i], {}, at::Reduction::Sum);
    loss = loss / batch.labels.size(0);
    muster::autograd::backward(context, {loss});
    sgd_.step(context);
    losses.push_back(loss.item<double>());
    seconds.push_back(now() - begin);
  }

  // The part of the time in which both halves worked.
  double together() const {
    const auto first = first_.sync<&Half::spans>(), second = second_.sync<&Half::spans>();
    double both = 0;
    for (const Span& a : first)
      for (const Span& b : second) both += std::max(0.0, std::min(a.end, b.end) - std::max(a.begin, b.begin));
    return both / std::accumulate(seconds.begin(), seconds.end(), 0.0);
  }
  int splits() const { return splits_; }

  std::vector<double> losses, seconds;  // of each step

 private:
  optim::DistributedOptimizer<optim::SGD> sgd(const Settings& settings) const {
    auto all = first_.sync<&Half::parameters>();  // waits until the half has been made
    for (auto& one : second_.sync<&Half::parameters>()) all.push_back(std::move(one));
    return {{.lr = settings.lr, .momentum = 0.9}, std::move(all)};
  }

  const int splits_;
  const rpc::RRef<Half> first_, second_;
  optim::DistributedOptimizer<optim::SGD> sgd_;
};

// The same net in this process, each batch as a whole.
std::vector<double> train_alone(const Data& data, const Settings& settings) {
  auto first = make_half(0, true), second = make_half(1, true);
  auto parameters = first->parameters();
  for (const Tensor& one : second->parameters()) parameters.push_back(one);
  optim::SGD sgd({.lr = settings.lr, .momentum = 0.9});
  std::vector<double> losses;
  for (int step = 0; step < settings.steps; ++step) {
    const Data batch = data.batch(step, settings.batch);
    const Tensor loss = at::cross_entropy_loss(second->forward(first->forward(batch.images)), batch.labels);
    sgd.step(parameters, torch::autograd::grad({loss}, parameters));
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// --- what comes out ---

// Uses all steps but the first, which warms up.
double median(std::vector<double> values) {
  if (values.size() > 1) values.erase(values.begin());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void draw(const Settings& settings, const std::vector<std::unique_ptr<Pipeline>>& pipelines) {
  muster::Series middle{.name = "median", .x = {}, .y = {}, .markers = true}, fastest = middle;
  fastest.name = "fastest";
  for (const auto& one : pipelines) {
    middle.x.push_back(one->splits());
    middle.y.push_back(1e3 * median(one->seconds));
    fastest.x.push_back(one->splits());
    fastest.y.push_back(1e3 * *std::min_element(one->seconds.begin(), one->seconds.end()));
  }
  const auto& losses = pipelines.back()->losses;
  std::vector<double> steps(losses.size());
  std::iota(steps.begin(), steps.end(), 1);
  muster::write_svg(settings.curve, {.title = "Two halves of a net on two workers",
                                     .subtitle = "batches of " + std::to_string(settings.batch) + " images, in parts",
                                     .panels = {{.title = "ms a batch, of " + std::to_string(settings.steps),
                                                 .x_label = "micro-batches a batch",
                                                 .series = {middle, fastest},
                                                 .x_whole = true,
                                                 .x_min = 0,
                                                 .y_min = 0},
                                                {.title = "loss of a batch",
                                                 .x_label = "step",
                                                 .series = {{.name = "", .x = steps, .y = losses}},
                                                 .x_whole = true,
                                                 .y_min = 0}}});
  std::printf("the curves are in %s\n", settings.curve.c_str());
}

// Trains all pipelines, in turns, so that other load on the machine affects all of them. Returns whether the check
// holds.
bool compare(const Settings& settings) {
  Data data = load(settings);
  if (settings.check) data.images = data.images.to(at::kDouble);
  std::vector<std::unique_ptr<Pipeline>> pipelines;
  for (const int splits : settings.splits) pipelines.push_back(std::make_unique<Pipeline>(splits, settings));
  for (int step = 0; step < settings.steps; ++step)
    for (const auto& one : pipelines) one->step(data.batch(step, settings.batch));

  for (const auto& one : pipelines)
    std::printf("batches in %d: %.0f images/s, both halves at work %.1f %% of the time\n", one->splits(),
                static_cast<double>(settings.batch) / median(one->seconds), 100 * one->together());
  std::printf("loss: %.4f at first, %.4f at last\n", pipelines.back()->losses.front(), pipelines.back()->losses.back());
  if (!settings.curve.empty()) draw(settings, pipelines);
  if (!settings.check) return true;
  const auto alone = train_alone(data, settings);
  double most = 0;
  bool same = true;  // false also for a NaN
  for (const auto& one : pipelines)
    for (size_t i = 0; i < alone.size(); ++i) {
      const double by = std::abs(one->losses[i] - alone[i]);
      most = std::max(most, by);
      same = same && by < 1e-5;
    }
  std::printf("check: the losses of one process %s, and differ by %.1e at most\n", same ? "are the same" : "DIFFER",
              most);
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  CLI::App app("A net in two halves, and batches in parts, so that both halves work at the same time");
  app.add_option("--steps", settings.steps, "steps per training")->check(CLI::Range(1, 100000))->capture_default_str();
  app.add_option("--batch", settings.batch, "images per batch")->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--splits", settings.splits, "micro-batches per batch; a training for each")
      ->check(CLI::Range(1, 16))
      ->delimiter(',')
      ->capture_default_str();
  app.add_option("--lr", settings.lr, "learning rate")->capture_default_str();
  app.add_option("--data", settings.data, "folder of Fashion-MNIST")->capture_default_str();
  app.add_flag("--check", settings.check,
               "train in one process as well, all in doubles: the losses must be the same to 1e-5");
  app.add_option("--curve", settings.curve, "draw times and losses in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  if (world.world_size() != 3) {
    if (world.rank() == 0) std::fprintf(stderr, "the pipeline needs 3 workers: muster run -n 3 …\n");
    return 2;
  }
  rpc::init();
  const bool good = world.rank() != 0 || compare(settings);
  rpc::shutdown();
  return good ? 0 : 1;
}
