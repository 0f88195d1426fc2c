// The networks that the benchmarks of training share. peers/nets.py has the same layers.
//
// Thread-safety: one thread, as torch::nn::Module.
#pragma once

#include <torch/nn.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "muster/parallel/activation_checkpoint.h"
#include "support/resnet18.h"

namespace bench {

struct Net : torch::nn::Module {
  virtual torch::Tensor forward(torch::Tensor x) = 0;
};

struct Small final : Net {  // 21,840 parameters
  torch::nn::Conv2d conv1 = register_module("conv1", torch::nn::Conv2d(1, 10, 5));
  torch::nn::Conv2d conv2 = register_module("conv2", torch::nn::Conv2d(10, 20, 5));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(320, 50)),
                    fc2 = register_module("fc2", torch::nn::Linear(50, 10));
  torch::Tensor forward(torch::Tensor x) override {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(conv2(x), 2)).flatten(1);
    return fc2(torch::relu(fc1(x)));
  }
};

struct Wide final : Net {  // 25.4 million parameters, 102 MB of gradients
  torch::nn::Linear a = register_module("a", torch::nn::Linear(784, 4096)),
                    b = register_module("b", torch::nn::Linear(4096, 4096)),
                    c = register_module("c", torch::nn::Linear(4096, 1320)),
                    d = register_module("d", torch::nn::Linear(1320, 10));
  torch::Tensor forward(torch::Tensor x) override {
    return d(torch::relu(c(torch::relu(b(torch::relu(a(x.flatten(1))))))));
  }
};

struct ResNet18 final : Net {  // 11.17 million parameters, 45 MB of gradients
  torch::nn::Sequential layers = register_module("layers", muster::test::resnet18_for_cifar());
  torch::Tensor forward(torch::Tensor x) override { return layers->forward(x); }
};

// Encoder layers of 3.15 million parameters each. Eight have 25.2 million, 101 MB of gradients. From [length, n, 512]
// to the same shape.
struct Transformer final : Net {
  explicit Transformer(int blocks = 8, int64_t vocabulary = 0) {
    if (vocabulary > 0) words = register_module("words", torch::nn::Embedding(vocabulary, 512));
    for (int i = 0; i < blocks; ++i)
      layers->push_back(torch::nn::TransformerEncoderLayer(
          torch::nn::TransformerEncoderLayerOptions(512, 8).dim_feedforward(2048).dropout(0.0)));
    register_module("layers", layers);
  }
  torch::Tensor forward(torch::Tensor x) override {
    if (words) x = words(x);
    for (const auto& layer : *layers) {
      const auto run = [&](const torch::Tensor& y) {
        return layer->as<torch::nn::TransformerEncoderLayer>()->forward(y);
      };
      x = checkpoint ? muster::activation_checkpoint(*checkpoint, run, x) : run(x);
    }
    return x;
  }
  torch::nn::Embedding words = nullptr;  // if there is a vocabulary: inputs are words
  torch::nn::ModuleList layers;
  std::optional<muster::ActivationCheckpointOptions> checkpoint;  // set: activations are computed again in backward()
};

// What a rank trains. The data are random, because the time of a step does not depend on the values.
struct Workload {
  std::shared_ptr<Net> net;
  int64_t batch = 0;   // samples of each rank and step, unless the user chooses
  int64_t along = 0;   // the dimension of x that counts samples
  torch::Tensor x, y;  // 128 samples or more, and their classes; no y: the loss is the mean square

  void to(torch::Device device) {
    net->to(device);
    x = x.to(device);
    if (y.defined()) y = y.to(device);
  }
  int64_t samples() const { return x.size(along); }
  // The samples from `first` on: a part of the same work.
  std::pair<torch::Tensor, torch::Tensor> part(int64_t first, int64_t count) const {
    return {x.narrow(along, first, count), y.defined() ? y.narrow(0, first, count) : y};
  }
  static torch::Tensor loss(const torch::Tensor& output, const torch::Tensor& target) {
    return target.defined() ? torch::nn::functional::cross_entropy(output, target) : output.square().mean();
  }
};

// "small" and "wide" (Fashion-MNIST's shapes), "resnet18" (CIFAR-10's), or "transformer" (sequences of 64 tokens).
inline Workload workload_of(const std::string& net) {
  const auto classes = [](int64_t n) { return torch::randint(10, {n}); };
  if (net == "small") return {std::make_shared<Small>(), 64, 0, torch::rand({8192, 1, 28, 28}), classes(8192)};
  if (net == "wide") return {std::make_shared<Wide>(), 64, 0, torch::rand({8192, 1, 28, 28}), classes(8192)};
  if (net == "resnet18") return {std::make_shared<ResNet18>(), 8, 0, torch::rand({512, 3, 32, 32}), classes(512)};
  if (net == "transformer") return {std::make_shared<Transformer>(), 4, 1, torch::randn({64, 128, 512}), {}};
  throw std::invalid_argument("there is no net " + net);
}

}  // namespace bench
