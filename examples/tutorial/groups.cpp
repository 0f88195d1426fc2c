// Groups: the even ranks and the odd ranks each compute their own sum, then all ranks together.
//
//   muster run -n 4 tutorial_groups
#include <ATen/ops/full.h>
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>

#include <cstdio>

int main() {
  auto world = muster::init();
  std::vector<int> even, odd;
  for (int r = 0; r < world.world_size(); ++r) (r % 2 == 0 ? even : odd).push_back(r);

  // Every rank creates every group, including those that it is not in, in the same order.
  const muster::Group evens = world.new_group(even), odds = odd.empty() ? evens : world.new_group(odd);
  const muster::Group& mine = world.rank() % 2 == 0 ? evens : odds;

  const at::Tensor in_group = at::full({1}, world.rank() + 1.0), in_all = in_group.clone();
  muster::all_reduce(in_group, {.group = mine});
  muster::all_reduce(in_all, {.op = muster::ReduceOp::MAX});
  std::printf("rank %d is %d of %d in its group: sum %g, largest of all %g\n", world.rank(), mine.rank(), mine.size(),
              in_group.item<double>(), in_all.item<double>());
  muster::barrier();
}
