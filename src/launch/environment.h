// The environment of each rank: this process's own, torchrun's variables, and Muster's.
//
// Thread-safety: construction, as getenv(3); afterwards immutable.
#pragma once

#include <string>
#include <vector>

#include "muster/launch/launcher.h"

namespace muster::launch {

struct Job {
  std::string id, store_address;
  int ranks = 1;
  int master_port = 0;      // for scripts that bring their own TCPStore; nothing listens there now
  bool terminal = false;    // whether standard error is a terminal that rank 0 may draw on
  int terminal_width = 80;  // for a rank's own text
};

// A fresh id and store name, and a free port.
Job make_job(const LaunchOptions& options);

// "NAME=value" strings and the array of pointers to them that execve(2) takes.
class Environment {
 public:
  Environment();  // this process's
  void set(const std::string& name, const std::string& value);
  void unset(const std::string& name);
  bool has(const std::string& name) const;
  char** block();  // valid until the next change

 private:
  std::vector<std::string>::iterator find(const std::string& name);
  std::vector<std::string> variables_;
  std::vector<char*> block_;
};

// What all ranks share; set_rank() then makes it one rank's, whose black box is the descriptor `black_box`.
Environment job_environment(const Job& job, const LaunchOptions& options);
void set_rank(Environment& environment, const Job& job, int rank, int black_box);

// Cores that this process may use: its affinity, bounded by the CPU quota of its cgroups (cgroup v2, cpu.max).
int usable_cores();

}  // namespace muster::launch
