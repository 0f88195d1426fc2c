// A step of an optimizer over 25 million parameters in the tensors of a transformer, of Muster and of libtorch's C++:
//
//   bench_optimizers [THREADS|cuda]
//
// Prints a JSON line for each. bench/peers/optimizers_torch.py has Python's.
#include <ATen/Parallel.h>
#include <muster/optim/optimizers.h>
#include <torch/cuda.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "measure.h"

namespace {

at::Device device = at::kCPU;

// Eight layers of width 512.
std::vector<at::Tensor> parameters() {
  std::vector<at::Tensor> all;
  for (int layer = 0; layer < 8; ++layer)
    for (const auto& shape : std::vector<std::vector<int64_t>>{{1536, 512},
                                                               {1536},
                                                               {512, 512},
                                                               {512},
                                                               {2048, 512},
                                                               {2048},
                                                               {512, 2048},
                                                               {512},
                                                               {512},
                                                               {512},
                                                               {512},
                                                               {512}})
      all.push_back(torch::randn(shape, device).mul_(0.02).requires_grad_());
  for (const at::Tensor& parameter : all) parameter.mutable_grad() = torch::randn_like(parameter).mul_(0.01);
  return all;
}

template <typename Optimizer, typename Options>
void measure(const char* impl, const char* name, const Options& options) {
  Optimizer optimizer(parameters(), options);
  const int steps = device.is_cuda() ? 50 : 1;  // the device makes them one after another
  const double seconds = bench::best_mean(
                             10,
                             [&] {
                               for (int i = 0; i < steps; ++i) optimizer.step();
                               if (device.is_cuda()) torch::cuda::synchronize();
                             },
                             [] {}) /
                         steps;
  std::printf(
      "{\"bench\": \"optimizers\", \"impl\": \"%s\", \"case\": \"%s\", \"device\": \"%s\", \"threads\": %d, \"us\": "
      "%.1f}\n",
      impl, name, device.str().c_str(), at::get_num_threads(), seconds * 1e6);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "cuda")
    device = at::Device(at::kCUDA, 0);
  else if (argc > 1)
    at::set_num_threads(std::atoi(argv[1]));
  torch::manual_seed(0);
  namespace t = torch::optim;
  measure<muster::SGD>("muster", "sgd_momentum", muster::optim::SGDOptions{.lr = 1e-6, .momentum = 0.9});
  measure<t::SGD>("libtorch", "sgd_momentum", t::SGDOptions(1e-6).momentum(0.9));
  measure<muster::AdamW>("muster", "adamw", muster::optim::AdamWOptions{.lr = 1e-6});
  measure<t::AdamW>("libtorch", "adamw", t::AdamWOptions(1e-6));
  measure<muster::Adagrad>("muster", "adagrad", muster::optim::AdagradOptions{.lr = 1e-6});
  measure<t::Adagrad>("libtorch", "adagrad", t::AdagradOptions(1e-6));
}
