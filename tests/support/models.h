// Models as people have them: a residual net, wide convolutions, a transformer with tied embeddings, an LSTM; frozen,
// unused, shared and empty parameters. forward(rank, step) gives the loss of a rank's part of a step's batch.
//
// expect_as_alone() trains one of them for some steps on two ranks or more, and in one process that takes the ranks'
// parts of each batch one after the other. What is compared is how far each parameter has moved from where it began:
// all that training adds, and that without the average would be that of one rank alone. The losses of all steps must be
// equal as well, and the buffers (the running statistics of BatchNorm) that each rank has after the last step.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/world/world_starter.h"
#include "muster/muster.h"
#include "support/full_run.h"
#include "support/patience.h"
#include "support/resnet18.h"

namespace muster::test {

namespace nn = torch::nn;
using torch::Tensor;

constexpr int kRanks = 2;

// Where batches are put, in this thread.
inline thread_local torch::Device batches_on = torch::kCPU;

// Everything is computed in doubles while it lives.
struct InDoubles {
  InDoubles() { torch::set_default_dtype(caffe2::TypeMeta::Make<double>()); }
  ~InDoubles() { torch::set_default_dtype(caffe2::TypeMeta::Make<float>()); }
};

// In the place of a rank: the whole batch, which is the parts of all kRanks ranks.
constexpr int kWholeBatch = -1;

// Each from a generator of its own: libtorch's default one is the process's, and ranks are threads.
inline at::Generator generator_of(int rank, int step) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(1000 * step + rank));
}
// A rank's part of a batch, or the whole batch, along the dimension `batch`.
template <typename Part>
Tensor part_of_batch(int rank, int64_t batch, const Part& part) {
  if (rank != kWholeBatch) return part(rank).to(batches_on);
  std::vector<Tensor> parts;
  for (int r = 0; r < kRanks; ++r) parts.push_back(part(r));
  return torch::cat(parts, batch).to(batches_on);
}
inline Tensor drawn(int rank, int step, torch::IntArrayRef sizes, int64_t batch = 0) {
  return part_of_batch(rank, batch, [&](int r) { return torch::randn(sizes, generator_of(r, step)); });
}
inline Tensor words(int rank, int step, torch::IntArrayRef sizes, int64_t vocabulary, int64_t batch = 0) {
  return part_of_batch(rank, batch, [&](int r) { return torch::randint(vocabulary, sizes, generator_of(r, step)); });
}

// --- models ---

// How a net calls its blocks; empty: it only calls them.
using CallBlock = std::function<Tensor(const std::function<Tensor(const Tensor&)>& block, const Tensor& x)>;

// ResNet-18: 11.7 million parameters.
struct ResNet18 : nn::Module {
  Tensor forward(int rank, int step) {
    const Tensor pictures = drawn(rank, step, {2, 3, 64, 64}).to(layers->parameters()[0].scalar_type());
    return torch::cross_entropy_loss(logits(pictures).to(torch::get_default_dtype()), words(rank, step, {2}, 1000));
  }
  Tensor logits(Tensor x) {
    if (!call_block) return layers->forward(x);
    for (nn::AnyModule& layer : *layers) {
      const auto run = [&layer](const Tensor& y) { return layer.forward(y); };
      x = layer.ptr()->as<ResidualBlock>() ? call_block(run, x) : run(x);
    }
    return x;
  }
  CallBlock call_block;
  nn::Sequential layers = register_module("layers", resnet18());
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
    const Tensor text = words(rank, step, {kLength + 1, 3}, kWords, 1);
    Tensor y = table(text.slice(0, 0, kLength)) * 8;
    for (const auto& layer : *encoder->layers) {
      const auto run = [&layer](const Tensor& x) { return layer->as<nn::TransformerEncoderLayer>()->forward(x); };
      y = call_block ? call_block(run, y) : run(y);
    }
    const Tensor logits = torch::nn::functional::linear(y, table->weight);
    return torch::cross_entropy_loss(logits.flatten(0, 1).to(torch::get_default_dtype()), text.slice(0, 1).flatten());
  }
  nn::Embedding table = register_module("table", nn::Embedding(kWords, kWidth));
  nn::TransformerEncoder encoder{nullptr};
  CallBlock call_block;
};

struct Recurrent : nn::Module {
  Tensor forward(int rank, int step) {
    const auto [y, state] = lstm(drawn(rank, step, {7, 4, 128}, 1).to(last->weight.scalar_type()));
    return (last(y).square().mean() + std::get<0>(state).mean()).to(torch::get_default_dtype());
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

// Two models and the losses of their training: the last backward goes through both.
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

// --- the comparison ---

using Prepare = std::function<void(nn::Module&)>;

// libtorch's default generator fills a new net: one thread at a time draws from it.
inline std::mutex drawing;
template <typename Net>
std::shared_ptr<Net> make(uint64_t seed, const Prepare& prepare) {
  const std::lock_guard lock(drawing);
  torch::manual_seed(seed);
  const auto net = std::make_shared<Net>();
  if (prepare) prepare(*net);
  return net;
}

using Values = torch::OrderedDict<std::string, Tensor>;
inline Values copies(const Values& of) {
  const torch::NoGradGuard no_grad;
  Values all;
  for (const auto& item : of) all.insert(item.key(), item.value().clone());
  return all;
}

inline double largest(const Tensor& of) { return of.abs().max().item<double>(); }

// What the parameters have moved by is compared, and must be far more than a rounding of their own values. (Two ranks'
// gradients have one sum, so DDP's results are usually equal to the bit.)
struct Tolerance {
  double apart = 1e-6;  // of how far the parameter has moved
  double moved = 1e-3;  // of the parameter, at least; a rounding is 6e-8 of it
};
// Where gradients are clipped, or Adam divides them by a root of their squares: what is a rounding of a gradient that
// is almost 0 is a part of such a step.
constexpr Tolerance kAmplified{.apart = 1e-3};

inline void expect_close(const nn::Module& got, const nn::Module& wanted, const Values& before,
                         const Tolerance& tolerance) {
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

inline void expect_equal_buffers(const nn::Module& got, const Values& wanted, double tolerance = 1e-6) {
  for (const auto& item : got.named_buffers()) {
    const Tensor &ours = item.value(), &value = wanted[item.key()];
    if (value.is_floating_point())
      EXPECT_LE(largest(ours - value), tolerance * largest(value)) << item.key();
    else
      EXPECT_TRUE(torch::equal(ours, value)) << item.key();
  }
}

struct How {
  Prepare prepare;  // of each rank's module, before it is wrapped
  double rate = 0.05;
  Tolerance tolerance;
  bool find_unused_parameters = false;
  bool replace_allocator = true;
  int steps = full_run() ? 20 : 3;
  std::vector<std::string> hosts = {"host", "host"};  // by rank
};

// What one process has come to. By rank: the buffers after the last step, and the losses of all steps.
template <typename Net>
struct Alone {
  std::shared_ptr<Net> net;
  Values before;  // the parameters
  std::vector<Values> buffers;
  std::vector<std::vector<double>> losses;
};

// Each parameter's gradient becomes the average of `grads`, by rank: those of each host are added in the order of its
// ranks, then the sums of the hosts, and the sum of all is divided. So does Muster, and results are equal to the bit. One
// that no rank has stays undefined.
inline void set_averages(const std::vector<Tensor>& parameters, const std::vector<std::vector<Tensor>>& grads,
                         const std::vector<std::string>& hosts) {
  const torch::NoGradGuard no_grad;
  std::vector<std::string> names;
  for (const std::string& host : hosts)
    if (std::find(names.begin(), names.end(), host) == names.end()) names.push_back(host);
  const auto add = [](Tensor& sum, const Tensor& grad) {
    if (grad.defined()) sum = sum.defined() ? sum + grad : grad;
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    Tensor all;
    for (const std::string& name : names) {
      Tensor of_host;
      for (size_t rank = 0; rank < hosts.size(); ++rank)
        if (hosts[rank] == name) add(of_host, grads[rank][i]);
      add(all, of_host);
    }
    Tensor parameter = parameters[i];
    parameter.mutable_grad() = all.defined() ? all / static_cast<double>(hosts.size()) : all;
  }
}

// In one process: the ranks' parts one after the other. Rank 0's comes last, since its buffers are those that the next
// step begins with.
template <typename Net>
Alone<Net> train_alone(const How& how) {
  at::set_num_threads(1);
  const size_t ranks = how.hosts.size();
  Alone<Net> alone;
  alone.net = make<Net>(7, how.prepare);
  alone.buffers.resize(ranks);
  alone.before = copies(alone.net->named_parameters());
  alone.losses.resize(ranks);
  const std::vector<Tensor> parameters = alone.net->parameters();
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(how.rate).momentum(0.9));
  for (int step = 0; step < how.steps; ++step) {
    const Values before = copies(alone.net->named_buffers());
    std::vector<std::vector<Tensor>> grads(ranks);
    for (size_t rank = ranks; rank-- > 0;) {
      for (auto& item : alone.net->named_buffers()) item.value().copy_(before[item.key()]);
      optimizer.zero_grad();
      const Tensor loss = alone.net->forward(static_cast<int>(rank), step);
      loss.backward();
      for (const Tensor& parameter : parameters) grads[rank].push_back(parameter.grad());
      alone.losses[rank].push_back(loss.template item<double>());
      alone.buffers[rank] = copies(alone.net->named_buffers());
    }
    set_averages(parameters, grads, how.hosts);
    optimizer.step();
  }
  return alone;
}

// Parallel: DistributedDataParallel or FullyShardedDataParallel.
template <template <typename> typename Parallel, typename Net>
void expect_as(const Alone<Net>& alone, const How& how) {
  const auto rank = [&](World& world) {
    at::set_num_threads(1);  // this thread's own
    const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), how.prepare);
    Parallel<Net> model(
        net, {.find_unused_parameters = how.find_unused_parameters, .replace_allocator = how.replace_allocator});
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(how.rate).momentum(0.9));
    const auto own = static_cast<size_t>(world.rank());
    for (int step = 0; step < how.steps; ++step) {
      optimizer.zero_grad();
      const Tensor loss = model(world.rank(), step);
      const double value = loss.template item<double>(), expected = alone.losses[own][static_cast<size_t>(step)];
      EXPECT_LE(std::abs(value - expected), how.tolerance.apart * std::abs(expected)) << "loss of step " << step;
      loss.backward();
      optimizer.step();
    }
    if constexpr (requires { model.gather(); }) model.gather();
    expect_close(*net, *alone.net, alone.before, how.tolerance);
    expect_equal_buffers(*net, alone.buffers[own], std::min(1e-6, how.tolerance.apart));
    barrier();  // where ranks share parameters, all have read them
  };
  comm::WorldStarter(how.hosts).run_threads(static_cast<int>(how.hosts.size()), rank, {.timeout = kPatience});
}
template <template <typename> typename Parallel, typename Net>
void expect_as_alone(const How& how = {}) {
  expect_as<Parallel>(train_alone<Net>(how), how);
}

}  // namespace muster::test
