// DistributedDataParallel on models as people have them: a residual net, wide convolutions, a transformer with tied
// embeddings, an LSTM, a GAN, frozen, unused and shared parameters. Each trains for some steps on two ranks, and in one
// process that takes the ranks' parts of each batch one after the other. What is compared is how far each parameter has
// moved from where it began: all that training adds, and that without the average would be that of one rank alone. The
// buffers (the running statistics of BatchNorm) must be equal as well: those that each rank has after the last step.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <mutex>
#include <stdexcept>

#include "muster/muster.h"
#include "muster/optim/meta.h"
#include "support/full_run.h"
#include "support/patience.h"

namespace muster {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int kRanks = 2;

// libtorch's default generator is the process's, and ranks are threads: one at a time draws from it.
std::mutex drawing;
Tensor drawn(int rank, int step, torch::IntArrayRef sizes) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(1000 * step + rank);
  return torch::randn(sizes);
}
Tensor words(int rank, int step, torch::IntArrayRef sizes, int64_t vocabulary) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(1000 * step + rank);
  return torch::randint(vocabulary, sizes);
}

// --- models: forward() gives the loss of a rank's part of a step's batch ---

struct ResidualBlock : nn::Module {
  ResidualBlock(int64_t in, int64_t out, int64_t stride)
      : first(nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)),
        second(nn::Conv2dOptions(out, out, 3).padding(1).bias(false)),
        first_norm(out),
        second_norm(out) {
    register_module("first", first);
    register_module("second", second);
    register_module("first_norm", first_norm);
    register_module("second_norm", second_norm);
    if (stride != 1 || in != out)
      shortcut = register_module(
          "shortcut",
          nn::Sequential(nn::Conv2d(nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)), nn::BatchNorm2d(out)));
  }
  Tensor forward(const Tensor& x) {
    const Tensor y = second_norm(second(torch::relu(first_norm(first(x)))));
    return torch::relu(y + (shortcut ? shortcut->forward(x) : x));
  }
  nn::Conv2d first, second;
  nn::BatchNorm2d first_norm, second_norm;
  nn::Sequential shortcut{nullptr};
};

// ResNet-18: 11.7 million parameters.
struct ResNet18 : nn::Module {
  ResNet18() {
    layers->push_back(nn::Conv2d(nn::Conv2dOptions(3, 64, 7).stride(2).padding(3).bias(false)));
    layers->push_back(nn::BatchNorm2d(64));
    layers->push_back(nn::ReLU());
    layers->push_back(nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
    int64_t channels = 64;
    for (const int64_t width : {64, 128, 256, 512})
      for (const bool first : {true, false}) {
        layers->push_back(ResidualBlock(channels, width, first && width > 64 ? 2 : 1));
        channels = width;
      }
    layers->push_back(nn::AdaptiveAvgPool2d(1));
    layers->push_back(nn::Flatten());
    layers->push_back(nn::Linear(512, 1000));
    register_module("layers", layers);
  }
  Tensor forward(int rank, int step) {
    return torch::cross_entropy_loss(layers->forward(drawn(rank, step, {2, 3, 64, 64})), words(rank, step, {2}, 1000));
  }
  nn::Sequential layers;
};

// As the last blocks of VGG: each weight of several megabytes.
struct WideConvolutions : nn::Module {
  Tensor forward(int rank, int step) {
    Tensor x = drawn(rank, step, {2, 256, 6, 6}).to(first->weight.scalar_type());
    if (first->weight.is_contiguous(torch::MemoryFormat::ChannelsLast))
      x = x.contiguous(torch::MemoryFormat::ChannelsLast);
    return second(torch::relu(first(x))).mean({2, 3}).to(torch::get_default_dtype()).square().sum();
  }
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(256, 512, 3).padding(1))),
             second = register_module("second", nn::Conv2d(nn::Conv2dOptions(512, 256, 3).padding(1)));
};

// A language model whose table of vectors is the last layer's weight as well.
struct Transformer : nn::Module {
  static constexpr int64_t kWords = 3000, kWidth = 128, kLength = 12;
  Transformer() {
    nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(kWidth, 4).dim_feedforward(512).dropout(0));
    encoder = register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(layer, 2)));
  }
  Tensor forward(int rank, int step) {
    const Tensor text = words(rank, step, {kLength + 1, 3}, kWords);
    const Tensor y = encoder(table(text.slice(0, 0, kLength)) * 8);
    const Tensor logits = torch::nn::functional::linear(y, table->weight);
    return torch::cross_entropy_loss(logits.flatten(0, 1), text.slice(0, 1).flatten());
  }
  nn::Embedding table = register_module("table", nn::Embedding(kWords, kWidth));
  nn::TransformerEncoder encoder{nullptr};
};

struct Recurrent : nn::Module {
  Tensor forward(int rank, int step) {
    const auto [y, state] = lstm(drawn(rank, step, {7, 4, 128}));
    return last(y).square().mean() + std::get<0>(state).mean();
  }
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(128, 384).num_layers(2)));
  nn::Linear last = register_module("last", nn::Linear(384, 32));
};

// Frozen, shared and empty parameters, and some that a step uses on both ranks, on one of them or on none.
struct Mixed : nn::Module {
  Mixed() {
    frozen->weight.set_requires_grad(false);
    empty = register_parameter("empty", torch::zeros({0, 5}));
    again = register_module("again", body);
  }
  Tensor forward(int rank, int step) {
    Tensor y = again(torch::relu(body(frozen(drawn(rank, step, {5, 64})))));
    if ((step + rank) % 4 < 2) y = y + sometimes(y);
    return y.square().mean() + empty.sum();
  }
  nn::Linear frozen = register_module("frozen", nn::Linear(64, 640)),
             body = register_module("body", nn::Linear(640, 640)), again{nullptr},
             sometimes = register_module("sometimes", nn::Linear(640, 640));
  Tensor empty;
};

// --- the comparison ---

using Prepare = std::function<void(nn::Module&)>;

template <typename Net>
std::shared_ptr<Net> make(uint64_t seed, const Prepare& prepare) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(seed);
  const auto net = std::make_shared<Net>();
  if (prepare) prepare(*net);
  return net;
}

using Values = torch::OrderedDict<std::string, Tensor>;
Values copies(const Values& of) {
  const torch::NoGradGuard no_grad;
  Values all;
  for (const auto& item : of) all.insert(item.key(), item.value().clone());
  return all;
}

double largest(const Tensor& of) { return of.abs().max().item<double>(); }

// What the parameters have moved by is compared, and must be far more than a rounding of their own values.
struct Tolerance {
  double apart = 1e-3;  // of how far the parameter has moved
  double moved = 1e-3;  // of the parameter, at least; a rounding is 6e-8 of it
};

void expect_close(const nn::Module& got, const nn::Module& wanted, const Values& before, const Tolerance& tolerance) {
  const torch::NoGradGuard no_grad;
  const auto expected = wanted.named_parameters();
  for (const auto& item : got.named_parameters()) {
    const Tensor& value = expected[item.key()];
    if (value.numel() == 0) continue;
    EXPECT_TRUE(value.isfinite().all().item<bool>()) << item.key();
    const double moved = largest(value - before[item.key()]);
    EXPECT_LE(largest(item.value() - value), tolerance.apart * moved) << item.key();
    if (value.requires_grad()) {
      EXPECT_GE(moved, tolerance.moved * largest(before[item.key()])) << item.key();
      EXPECT_GT(moved, 0) << item.key();
    }
  }
}

void expect_equal_buffers(const nn::Module& got, const Values& wanted) {
  for (const auto& item : got.named_buffers()) {
    const Tensor &ours = item.value(), &value = wanted[item.key()];
    if (value.is_floating_point())
      EXPECT_LE(largest(ours - value), 1e-6 * largest(value)) << item.key();
    else
      EXPECT_TRUE(torch::equal(ours, value)) << item.key();
  }
}

struct How {
  Prepare prepare;  // of each rank's module, before it is wrapped
  DdpOptions ddp;
  double rate = 0.05;
  Tolerance tolerance;
  int steps = test::full_run() ? 20 : 3;
};

// In one process: the ranks' parts one after the other. Rank 0's comes last, since its buffers are those that the next
// step begins with. Returns the buffers after the last step, by rank.
template <typename Net>
std::vector<Values> train_alone(Net& net, torch::optim::Optimizer& optimizer, int steps) {
  std::vector<Values> last(kRanks);
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Values before = copies(net.named_buffers());
    for (int rank = kRanks - 1; rank >= 0; --rank) {
      for (auto& item : net.named_buffers()) item.value().copy_(before[item.key()]);
      (net.forward(rank, step) / kRanks).backward();
      last[static_cast<size_t>(rank)] = copies(net.named_buffers());
    }
    optimizer.step();
  }
  return last;
}

template <typename Net>
void expect_as_alone(const How& how = {}) {
  at::set_num_threads(1);
  const auto alone = make<Net>(7, how.prepare);
  const Values before = copies(alone->named_parameters());
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(how.rate).momentum(0.9));
  const auto buffers = train_alone(*alone, sgd, how.steps);
  run_threads(kRanks,
              [&](World& world) {
                const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), how.prepare);
                DistributedDataParallel ddp(net, how.ddp);
                torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(how.rate).momentum(0.9));
                for (int step = 0; step < how.steps; ++step) {
                  optimizer.zero_grad();
                  ddp(world.rank(), step).backward();
                  optimizer.step();
                }
                expect_close(*net, *alone, before, how.tolerance);
                expect_equal_buffers(*net, buffers[static_cast<size_t>(world.rank())]);
              },
              {.timeout = test::kPatience});
}

TEST(Models, ResNet18) { expect_as_alone<ResNet18>({.rate = 0.05}); }
TEST(Models, WideConvolutions) { expect_as_alone<WideConvolutions>({.rate = 1e-3}); }
TEST(Models, TransformerWithTiedEmbeddings) { expect_as_alone<Transformer>(); }
TEST(Models, TwoLayersOfLstm) { expect_as_alone<Recurrent>({.rate = 0.5}); }
// --- meta-learning on the same models ---

// Everything is computed in doubles while it lives.
struct InDoubles {
  InDoubles() { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
  ~InDoubles() { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
};

// Two steps of SGD with momentum, written out, by libtorch's engine. Returns the gradient of the loss after them with
// respect to the net's parameters.
template <typename Net>
std::vector<Tensor> meta_gradient_by_hand(Net& net, double rate) {
  const auto first = net.parameters();
  optim::NamedTensors now;
  for (const auto& item : net.named_parameters()) now.emplace_back(item.key(), item.value());
  const auto loss = [&](int step) { return optim::functional_call(net, now, [&] { return net.forward(0, step); }); };
  std::vector<Tensor> momentum;
  for (int step = 0; step < 2; ++step) {
    std::vector<Tensor> parameters;
    for (const auto& [name, tensor] : now) parameters.push_back(tensor);
    const auto gradients = torch::autograd::grad({loss(step)}, parameters, {}, true, true);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (step == 0) momentum.push_back(gradients[i]);
      if (step > 0) momentum[i] = 0.9 * momentum[i] + gradients[i];
      now[i].second = parameters[i] - rate * momentum[i];
    }
  }
  return torch::autograd::grad({loss(2)}, first);
}

// Two steps of MetaSGD are those of torch::optim::SGD, and the gradient of the loss after them, with respect to the
// parameters before, is that of the steps written out; and, if the net has no bends at which the steps themselves would
// jump, the slope in a random direction.
template <typename Net>
void expect_meta_gradient(double rate, bool smooth) {
  at::set_num_threads(1);
  const InDoubles in_doubles;
  const auto start = make<Net>(7, nullptr);
  const auto adapt = [&](const optim::ModuleState& from) {
    const auto net = make<Net>(8, nullptr);
    optim::recover_state_dict(*net, from);
    optim::MetaSGD inner(*net, {.lr = rate, .momentum = 0.9});
    for (int step = 0; step < 2; ++step) inner.step(net->forward(0, step));
    return net;
  };
  const auto state = optim::extract_state_dict(*start, {.detach_buffers = true});
  const auto adapted = adapt(state);
  {
    const auto alone = make<Net>(7, nullptr);
    torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
    for (int step = 0; step < 2; ++step) {
      sgd.zero_grad();
      alone->forward(0, step).backward();
      sgd.step();
    }
    const auto expected = alone->named_parameters();
    for (const auto& item : adapted->named_parameters())
      EXPECT_LE(largest(item.value() - expected[item.key()]), 1e-9 * largest(expected[item.key()])) << item.key();
    for (const auto& item : adapted->named_buffers())
      EXPECT_LE(largest(item.value() - alone->named_buffers()[item.key()]), 1e-9) << item.key();
  }
  const auto gradients = torch::autograd::grad({adapted->forward(0, 2)}, start->parameters());
  const auto other = make<Net>(7, nullptr);
  const auto expected = meta_gradient_by_hand(*other, rate);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(largest(gradients[i] - expected[i]), 1e-9 * largest(expected[i])) << i;
  if (!smooth) return;
  torch::manual_seed(3);
  std::vector<Tensor> direction;
  double slope = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    direction.push_back(
        torch::randn_like(gradients[i]) * gradients[i].norm() / std::sqrt(double(gradients[i].numel())) + gradients[i]);
    slope += (direction[i] * gradients[i]).sum().template item<double>();
  }
  const auto loss_at = [&](double along) {
    auto moved = optim::extract_state_dict(*start, {.by = optim::CopyMode::kDeepCopy, .detach_buffers = true});
    const torch::NoGradGuard values_only;
    for (size_t i = 0; i < moved.parameters.size(); ++i) moved.parameters[i].second.add_(direction[i], along);
    const torch::AutoGradMode record(true);
    return adapt(moved)->forward(0, 2).template item<double>();
  };
  const double step = 1e-5 / std::sqrt(slope);
  EXPECT_GT(slope, 0);
  EXPECT_NEAR((loss_at(step) - loss_at(-step)) / (2 * step), slope, 1e-4 * slope);
}

TEST(Models, MetaGradientOfResNet18) { expect_meta_gradient<ResNet18>(0.01, false); }
TEST(Models, MetaGradientOfWideConvolutions) { expect_meta_gradient<WideConvolutions>(1e-3, true); }
TEST(Models, MetaGradientOfATransformerWithTiedEmbeddings) { expect_meta_gradient<Transformer>(0.05, false); }
TEST(Models, MetaGradientOfTwoLayersOfLstm) { expect_meta_gradient<Recurrent>(0.5, true); }

TEST(Models, FrozenUnusedSharedAndEmptyParameters) {
  expect_as_alone<Mixed>({.ddp = {.find_unused_parameters = true}, .rate = 0.5});
}

TEST(Models, InBFloat16) {
  const Prepare halved = [](nn::Module& net) { net.to(torch::kBFloat16); };
  expect_as_alone<WideConvolutions>({.prepare = halved, .rate = 4e-3, .tolerance = {.apart = 0.1, .moved = 0.05}});
}

TEST(Models, ChannelsLast) {
  expect_as_alone<WideConvolutions>({.prepare =
                                         [](nn::Module& net) {
                                           for (auto& parameter : net.parameters())
                                             if (parameter.dim() == 4)
                                               parameter.set_data(
                                                   parameter.contiguous(torch::MemoryFormat::ChannelsLast));
                                         },
                                     .rate = 1e-3});
}

TEST(Models, ParametersOnTheHeap) {
  const Prepare moved = [](nn::Module& net) {
    if (World* const world = World::current_or_null())
      for (auto& parameter : net.parameters())
        parameter.set_data(world->heap().empty(parameter.sizes()).copy_(parameter.detach()));
  };
  expect_as_alone<Recurrent>({.prepare = moved, .rate = 0.5});
}

TEST(Models, WithTheAllocatorLeftAlone) {
  expect_as_alone<WideConvolutions>({.ddp = {.replace_allocator = false}, .rate = 1e-3});
}

// --- what a training does besides ---

// Two small batches for each step, the first in no_sync(); gradients are clipped; in one step backward() throws on all
// ranks, and in the middle of the training the DDP object is destroyed and another one made.
TEST(Models, AccumulationClippingAnExceptionAndASecondDdp) {
  constexpr int kSteps = 6, kThrows = 2, kAgain = 4;
  const auto update = [](WideConvolutions& net, torch::optim::SGD& optimizer) {
    nn::utils::clip_grad_norm_(net.parameters(), 0.5);
    optimizer.step();
  };
  at::set_num_threads(1);
  const auto alone = make<WideConvolutions>(7, {});
  const Values before = copies(alone->named_parameters());
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < kSteps; ++step) {
    if (step == kThrows) continue;
    sgd.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank)
      for (const int half : {0, 1}) (alone->forward(rank, 2 * step + half) / kRanks).backward();
    update(*alone, sgd);
  }
  run_threads(kRanks,
              [&](World& world) {
                const auto net = make<WideConvolutions>(7 + static_cast<uint64_t>(world.rank()), {});
                auto ddp = std::make_unique<DistributedDataParallel<WideConvolutions>>(net);
                torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
                for (int step = 0; step < kSteps; ++step) {
                  if (step == kAgain) {
                    ddp.reset();
                    ddp = std::make_unique<DistributedDataParallel<WideConvolutions>>(net);
                  }
                  optimizer.zero_grad();
                  if (step == kThrows) {
                    Tensor loss = (*ddp)(world.rank(), 2 * step);
                    const auto hook = net->first->weight.register_hook(
                        [](const Tensor&) { throw std::runtime_error("in the middle"); });
                    EXPECT_THROW(loss.backward(), std::exception);
                    net->first->weight.remove_hook(hook);
                    continue;
                  }
                  {
                    const auto no_sync = ddp->no_sync();
                    (*ddp)(world.rank(), 2 * step).backward();
                  }
                  (*ddp)(world.rank(), 2 * step + 1).backward();
                  update(*net, optimizer);
                }
                expect_close(*net, *alone, before, {});
              },
              {.timeout = test::kPatience});
}

// Two models and two optimizers, three backward passes in a step, of which one goes through both models.
struct Generator : nn::Module {
  Tensor forward(const Tensor& z) { return second(torch::relu(first(z))); }
  nn::Linear first = register_module("first", nn::Linear(16, 512)),
             second = register_module("second", nn::Linear(512, 640));
};
struct Discriminator : nn::Module {
  Tensor forward(const Tensor& x) { return second(torch::relu(first(x))); }
  nn::Linear first = register_module("first", nn::Linear(640, 512)),
             second = register_module("second", nn::Linear(512, 1));
};

struct GanLosses {
  using Net = std::function<Tensor(const Tensor&)>;
  Net generator, discriminator;
  Tensor real(int rank, int step) const { return torch::softplus(-discriminator(drawn(rank, step, {6, 640}))).mean(); }
  Tensor fake(int rank, int step) const {
    return torch::softplus(discriminator(generator(drawn(rank, step + 100, {6, 16})).detach())).mean();
  }
  Tensor deceived(int rank, int step) const {
    return torch::softplus(-discriminator(generator(drawn(rank, step + 200, {6, 16})))).mean();
  }
};

TEST(Models, Gan) {
  const int steps = test::full_run() ? 20 : 3;
  at::set_num_threads(1);
  const auto parts = [&](const GanLosses& losses, nn::Module& generator, nn::Module& discriminator,
                         const std::vector<int>& ranks) {
    torch::optim::Adam of_generator(generator.parameters(), 1e-3), of_discriminator(discriminator.parameters(), 1e-3);
    const double share = 1.0 / static_cast<double>(ranks.size());
    for (int step = 0; step < steps; ++step) {
      of_discriminator.zero_grad();
      for (const int rank : ranks) {
        (share * losses.real(rank, step)).backward();
        (share * losses.fake(rank, step)).backward();
      }
      of_discriminator.step();
      of_generator.zero_grad();
      of_discriminator.zero_grad();
      for (const int rank : ranks) (share * losses.deceived(rank, step)).backward();
      of_generator.step();
    }
  };
  const auto generator = make<Generator>(7, {});
  const auto discriminator = make<Discriminator>(8, {});
  const Values before_g = copies(generator->named_parameters()), before_d = copies(discriminator->named_parameters());
  parts({[&](const Tensor& z) { return generator->forward(z); },
         [&](const Tensor& x) { return discriminator->forward(x); }},
        *generator, *discriminator, {0, 1});
  run_threads(kRanks,
              [&](World& world) {
                const auto seed = 7 + 2 * static_cast<uint64_t>(world.rank());
                const auto g = make<Generator>(seed, {});
                const auto d = make<Discriminator>(seed + 1, {});
                DistributedDataParallel ddp_g(g);
                DistributedDataParallel ddp_d(d);
                parts({[&](const Tensor& z) { return ddp_g(z); }, [&](const Tensor& x) { return ddp_d(x); }}, *g, *d,
                      {world.rank()});
                expect_close(*g, *generator, before_g, {});
                expect_close(*d, *discriminator, before_d, {});
              },
              {.timeout = test::kPatience});
}

// One parameter of 512 MB, with its gradient four times of it in memory and once more for the process alone.
struct Huge : nn::Module {
  Tensor forward(int rank, int step) {
    const Tensor x = drawn(rank, step, {4, 1 << 15});
    return weight.slice(0, 0, 4).mul(x).sum() + weight.slice(0, -4).mul(x).sum();
  }
  Tensor weight = register_parameter("weight", torch::ones({1 << 12, 1 << 15}));
};
TEST(ModelsLarge, AParameterOf512MB) { expect_as_alone<Huge>({.steps = 2}); }

}  // namespace
}  // namespace muster
