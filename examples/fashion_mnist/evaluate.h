// What both ways to train have in common: the check before the training, and the score after it.
#pragma once

#include <muster/base/error.h>
#include <muster/comm/world.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "flags.h"
#include "history.h"

// The test images are split over the ranks. No image is counted twice, and every rank gets the score of all images.
template <typename Loader>
Score evaluate(torch::nn::Sequential& net, Loader& loader) {
  torch::NoGradGuard no_grad;
  net->eval();
  Tally tally;
  for (auto& batch : loader) {
    const auto output = net->forward(batch.data);
    tally.add(output, batch.target, torch::nn::functional::cross_entropy(output, batch.target).template item<double>());
  }
  return tally.score();
}

// Finds errors before the training that would otherwise show only later.
inline void check(const Flags& flags, const muster::World& world) {
  const int ranks = world.world_size();
  if (flags.batch % ranks != 0) {
    throw muster::InvalidArgument("a batch of " + std::to_string(flags.batch) + " images cannot be split evenly over " +
                                      std::to_string(ranks) + " ranks",
                                  "Give --batch a multiple of " + std::to_string(ranks));
  }
  if (world.rank() != 0) return;
  for (const auto& file : {flags.out, flags.json}) {
    const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
    if (!file.empty() && ::access(folder.c_str(), W_OK) != 0) {
      throw muster::Unavailable("cannot write " + file.string() + ": its folder is not there or not writable",
                                "Create the folder or name another");
    }
  }
}

// Shares the cores among the ranks of this host.
inline void share_cores(const muster::World& world) {
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return;
  at::set_num_threads(std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / world.local_world_size()));
}
