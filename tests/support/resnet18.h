// ResNet-18, as libtorch's C++ API has no models. For tests and benchmarks.
// Source: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016.
#pragma once

#include <torch/nn.h>

#include <cstdint>
#include <memory>

namespace muster::test {

inline torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

struct ResidualBlock : torch::nn::Module {
  ResidualBlock(int64_t in, int64_t out, int64_t stride)
      : first(register_module("first", convolution(in, out, 3, stride))),
        second(register_module("second", convolution(out, out, 3, 1))),
        first_norm(register_module("first_norm", torch::nn::BatchNorm2d(out))),
        second_norm(register_module("second_norm", torch::nn::BatchNorm2d(out))) {
    if (stride != 1 || in != out)
      shortcut = register_module("shortcut",
                                 torch::nn::Sequential(convolution(in, out, 1, stride), torch::nn::BatchNorm2d(out)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const torch::Tensor y = second_norm(second(torch::relu(first_norm(first(x)))));
    return torch::relu(y + (shortcut ? shortcut->forward(x) : x));
  }
  torch::nn::Conv2d first, second;
  torch::nn::BatchNorm2d first_norm, second_norm;
  torch::nn::Sequential shortcut{nullptr};
};

// All layers of a ResNet-18 that come after the first ones: from [n, 64, height, width] to [n, classes].
inline void add_residual_layers(torch::nn::Sequential& layers, int64_t classes) {
  int64_t channels = 64;
  for (const int64_t width : {64, 128, 256, 512})
    for (const bool is_first : {true, false}) {
      layers->push_back(std::make_shared<ResidualBlock>(channels, width, is_first && width > 64 ? 2 : 1));
      channels = width;
    }
  layers->push_back(torch::nn::AdaptiveAvgPool2d(1));
  layers->push_back(torch::nn::Flatten());
  layers->push_back(torch::nn::Linear(512, classes));
}

// From images [n, 3, height, width] to [n, 1000].
inline torch::nn::Sequential resnet18() {
  torch::nn::Sequential layers(convolution(3, 64, 7, 2), torch::nn::BatchNorm2d(64), torch::nn::ReLU(),
                               torch::nn::MaxPool2d(torch::nn::MaxPool2dOptions(3).stride(2).padding(1)));
  add_residual_layers(layers, 1000);
  return layers;
}

// From CIFAR-10's images [n, 3, 32, 32] to [n, 10]: the first layers keep the size, as is usual for small images.
inline torch::nn::Sequential resnet18_for_cifar() {
  torch::nn::Sequential layers(convolution(3, 64, 3, 1), torch::nn::BatchNorm2d(64), torch::nn::ReLU());
  add_residual_layers(layers, 10);
  return layers;
}

}  // namespace muster::test
