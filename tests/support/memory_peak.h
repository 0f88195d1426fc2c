// How much more memory this process has at the highest point of a call than before it, in bytes: private and mapped
// pages that are in memory, as the kernel counts them. For a process in which no other thread allocates meanwhile.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <fstream>
#include <functional>
#include <string>

#include "base/process.h"

namespace muster::test {

inline size_t peak_of(const std::function<void()>& fn) {
  const auto kib = [](const std::string& key) {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;)
      if (word == key) {
        size_t value = 0;
        status >> value;
        return value;
      }
    ADD_FAILURE() << "no " << key << " in /proc/self/status";
    return size_t{0};
  };
  release_free_memory();
  const size_t before = kib("VmRSS:");
  std::ofstream reset("/proc/self/clear_refs");
  EXPECT_TRUE(static_cast<bool>(reset << 5 << std::flush)) << "VmHWM cannot begin anew";
  fn();
  return (kib("VmHWM:") - before) << 10;
}

}  // namespace muster::test
