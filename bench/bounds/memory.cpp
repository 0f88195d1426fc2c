// The memory that a group's segment takes after the group has used everything that it can do.
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bounds.h"
#include "job.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"

namespace bench {
namespace {

using muster::World;

// The size of this process's mappings of memfds with this name: the pages that exist, the pages that this process has
// touched (Rss), and the same divided among the processes that map them (Pss).
struct Memory {
  int64_t committed = 0, rss = 0, pss = 0;
};
Memory memory_of(const std::string& name) {
  Memory memory;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    struct stat info {};
    if (target.starts_with("/memfd:" + name) && ::stat(entry.path().c_str(), &info) == 0)
      memory.committed += info.st_blocks * 512;
  }
  std::ifstream maps("/proc/self/smaps");
  bool ours = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t kib = 0;
    words >> first;
    if (first.find('-') != std::string::npos && first.back() != ':') {
      ours = line.find("/memfd:" + name) != std::string::npos;
    } else if (ours && words >> kib) {
      if (first == "Rss:") memory.rss += kib << 10;
      if (first == "Pss:") memory.pss += kib << 10;
    }
  }
  return memory;
}

// Runs every collective, in sizes that reach every tier, and sends messages from every rank to every other.
void use_everything(World& world) {
  const int n = world.world_size(), me = world.rank();
  const int64_t large = n <= 8 ? 1'000'000 : 300'000;
  for (const int64_t count : {int64_t{10}, int64_t{3000}, large}) {
    const int64_t part = std::max<int64_t>(1, count / n);
    const at::Tensor whole = at::ones({count}), mine = at::ones({part}), all = at::ones({part * n}),
                     other = at::zeros({part * n});
    std::vector<at::Tensor> parts(static_cast<size_t>(n), mine);
    muster::all_reduce(whole);
    muster::broadcast(whole, 0);
    muster::reduce(whole, 0);
    muster::all_gather_into_tensor(all, mine);
    muster::reduce_scatter_tensor(mine, all);
    muster::all_to_all_single(other, all);
    std::vector<at::Tensor> gathered;
    for (int rank = 0; me == 0 && rank < n; ++rank) gathered.push_back(at::zeros({part}));
    muster::gather(mine, gathered, 0);
    muster::scatter(mine, gathered, 0);
  }
  const at::Tensor out = at::ones({50'000}), in = at::zeros({50'000});
  for (int step = 0; step < n; ++step) {
    muster::Work receive = muster::irecv(in, (me + n - step) % n);
    muster::send(out, (me + step) % n);
    receive.wait();
  }
  muster::barrier();
}

}  // namespace

void memory() {
  for (const auto& [n, bound] : {std::pair{2, 16}, std::pair{64, 64}}) {
    const Numbers numbers(static_cast<size_t>(3 * n));
    muster::WorldOptions options;
    options.backend = "shm";
    Job job(
        n,
        [&](World& world) {
          use_everything(world);
          const Memory memory = memory_of("muster-group");
          const auto me = static_cast<size_t>(world.rank());
          numbers[3 * me] = memory.committed;
          numbers[3 * me + 1] = memory.rss;
          numbers[3 * me + 2] = memory.pss;
          muster::barrier();  // no rank leaves before all have measured
        },
        options);
    job.wait_all();
    const char* const names[] = {"of the segment, for each rank", "that a rank has touched (Rss)",
                                 "that is a rank's share (Pss)"};
    for (size_t which = 0; which < 3; ++which) {
      std::vector<double> mb;
      for (size_t rank = 0; rank < static_cast<size_t>(n); ++rank)
        mb.push_back(static_cast<double>(numbers[3 * rank + which]) / 1e6 / (which == 0 ? n : 1));
      std::sort(mb.begin(), mb.end());
      // The memory that a rank has touched (Rss) has no bound of its own: it is at most the whole segment.
      print("memory", names[which], n, mb[mb.size() / 2], mb.back(), which == 1 ? double(bound) * n : bound, "MB");
    }
  }
}

}  // namespace bench
