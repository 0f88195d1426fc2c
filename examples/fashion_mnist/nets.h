// The two networks that the demo can train.
#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include "flags.h"

inline torch::nn::Sequential make_net(NetKind kind) {
  namespace nn = torch::nn;
  if (kind == NetKind::kSmall) {
    return nn::Sequential(nn::Conv2d(1, 10, 5), nn::MaxPool2d(2), nn::ReLU(),   //
                          nn::Conv2d(10, 20, 5), nn::MaxPool2d(2), nn::ReLU(),  //
                          nn::Flatten(), nn::Linear(320, 50), nn::ReLU(), nn::Linear(50, 10));
  }
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 16, 5).stride(2).padding(2)), nn::ReLU(),           //
                        nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1)), nn::MaxPool2d(2), nn::ReLU(),  //
                        nn::Flatten(), nn::Linear(32 * 7 * 7, 128), nn::ReLU(), nn::Linear(128, 10));
}
