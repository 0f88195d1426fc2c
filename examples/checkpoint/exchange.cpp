// A checkpoint that Python opens, and one from Python, with python/examples/exchange.py:
//
//   checkpoint_exchange write run1                   # trains, and leaves run1/step-20.snapshot.safetensors
//   python exchange.py read run1                     # prints the same outputs
//   python exchange.py write weights.safetensors     # trains in Python
//   checkpoint_exchange read weights.safetensors     # prints the outputs that Python has printed
//
// Both sides have the same net, with the same names. The files are safetensors files, so no side needs the other's
// library.
#include <muster/checkpoint/safetensors.h>
#include <muster/checkpoint/snapshot.h>
#include <muster/comm/world.h>
#include <muster/optim/optimizers.h>
#include <torch/nn.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <string>

namespace {

namespace nn = torch::nn;
using torch::Tensor;

nn::Sequential make_net() { return nn::Sequential(nn::Linear(4, 8), nn::ReLU(), nn::Linear(8, 2)); }

Tensor inputs() { return torch::linspace(-1, 1, 12).view({3, 4}); }

void print_outputs(nn::Sequential& net) {
  const torch::NoGradGuard no_grad;
  const Tensor outputs = net->forward(inputs()).flatten().contiguous();
  std::printf("outputs:");
  for (int64_t i = 0; i < outputs.numel(); ++i) std::printf(" %.6f", outputs[i].item<double>());
  std::printf("\n");
}

void write(const std::string& folder) {
  const auto world = muster::init();
  torch::manual_seed(1);
  nn::Sequential net = make_net();
  muster::AdamW adamw(net->parameters(), {.lr = 0.05});
  muster::Snapshot snapshot({.folder = folder});
  snapshot.add("net", net).add("adamw", adamw);
  int64_t step = snapshot.restore();
  while (step < 20) {
    adamw.zero_grad();
    (net->forward(inputs()) - 1).square().mean().backward();
    adamw.step();
    ++step;
  }
  snapshot.save(step);
  if (world.rank() == 0) print_outputs(net);
}

void read(const std::string& file) {
  nn::Sequential net = make_net();
  muster::SafetensorsFile(file).load_into(*net);
  print_outputs(net);
}

}  // namespace

int main(int argc, char** argv) {
  std::string path;
  CLI::App app("Checkpoints between C++ and Python");
  app.require_subcommand(1);
  auto* const writes = app.add_subcommand("write", "train, and save a snapshot in a folder");
  writes->add_option("FOLDER", path)->required();
  auto* const reads = app.add_subcommand("read", "load a safetensors file that Python has written");
  reads->add_option("FILE", path)->required();
  CLI11_PARSE(app, argc, argv);
  if (*writes) write(path);
  if (*reads) read(path);
}
