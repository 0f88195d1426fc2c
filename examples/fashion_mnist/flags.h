// The demo's command line.
#pragma once

#include <cstdint>
#include <filesystem>

enum class NetKind { kSmall, kDemo };

struct Flags {
  std::filesystem::path data = "/usr/share/datasets/fashion-mnist";
  int epochs = 8;
  int64_t batch = 128;  // images per step, over all ranks together
  double lr = 0.05;     // the highest learning rate of the schedule
  uint64_t seed = 0;
  NetKind net = NetKind::kDemo;
  int64_t limit = 0;  // 0: all images
  std::filesystem::path out = "fashion_mnist.svg";
  std::filesystem::path json;      // empty: none
  std::filesystem::path snapshot;  // folder to resume from and to save in; empty: none
  int64_t every = 100;             // steps between snapshots
  bool elastic = false;            // when a rank is lost, the others go on
};

// Throws muster::InvalidArgument, with one sentence, for invalid flags. Prints the help and exits for --help.
Flags parse_flags(int argc, char** argv);
