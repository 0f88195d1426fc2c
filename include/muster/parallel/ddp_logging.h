// DdpLoggingData: what a DistributedDataParallel is made of, and what its steps have taken on this rank.
//
//   std::cout << ddp.logging_data();
//
// A step is a backward() that averages, and that ended without an exception. `backward` begins at the end of the last
// forward() before it, so it has the loss, and ends with the averages. `communication` begins with the first bucket and
// ends with the averages, too; its part `exposed` begins when this rank has all of its gradients: so long, backward()
// did nothing but wait. A long wait may mean that other ranks compute longer. backward_by_shards() is not counted.
//
// Thread-safety: a value. Source: torch.nn.parallel.DistributedDataParallel._get_ddp_logging_data().
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace muster {

struct DdpLoggingData {
  struct Times {
    std::chrono::nanoseconds forward{0}, backward{0}, communication{0}, exposed{0};
  };

  int world_size = 0, rank = 0;      // of the group
  std::string module_name;           // torch::nn::Module::name()
  size_t parameters = 0;             // tensors that are trained
  size_t parameter_bytes = 0;        // of these
  double bucket_cap_mb = 0;          // as chosen, or as measured
  std::vector<size_t> bucket_bytes;  // in the order of reduction; of a large or sparse gradient, as its parameter has
  bool has_rebuilt_buckets = false;  // in the order in which gradients become ready
  bool has_comm_hook = false;

  int64_t steps = 0;
  Times last, average;
};

// One line for each member, as "average.forward: 1.25 ms".
std::ostream& operator<<(std::ostream& stream, const DdpLoggingData& data);

}  // namespace muster
