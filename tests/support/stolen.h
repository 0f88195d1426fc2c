// How much of the processors' time the host of this virtual machine has given to others: for bounds on what takes
// processor time.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace muster::test {

class Stolen {
 public:
  Stolen() : began_(read()) {}

  // Of the time since the construction: 0 where nothing was taken, as on a machine of one's own.
  double share() const {
    const Times now = read();
    const uint64_t all = now.all - began_.all;
    return all > 0 ? static_cast<double>(now.stolen - began_.stolen) / static_cast<double>(all) : 0;
  }

 private:
  struct Times {
    uint64_t all = 0, stolen = 0;
  };
  static Times read() {  // proc_stat(5): user nice system idle iowait irq softirq steal
    Times times;
    std::ifstream file("/proc/stat");
    std::string cpu;
    file >> cpu;
    for (int i = 0; i < 8 && file >> times.stolen; ++i) times.all += times.stolen;
    if (!file) return {};
    return times;
  }

  const Times began_;
};

}  // namespace muster::test
