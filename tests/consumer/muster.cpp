// Links Muster::muster: a world of one, or of as many as the launcher started.
#include <ATen/ops/ones.h>
#include <muster/muster.h>

#include <iostream>

int main() {
  auto world = muster::init();
  auto tensor = at::ones({4});
  muster::all_reduce(tensor);
  if (world.rank() == 0) std::cout << "sum: " << tensor.sum().item<float>() << std::endl;
}
