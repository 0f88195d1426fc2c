// The environment of each rank: this process's own, torchrun's variables, and Muster's.
//
// Thread-safety: construction, as getenv(3); afterwards immutable.
#pragma once

#include <string>
#include <vector>

#include "base/fd.h"
#include "muster/launch/launcher.h"

namespace muster::launch {

struct Job {
  std::string id;   // of what this launcher starts
  std::string run;  // the same on all hosts
  std::string store_address;
  std::string launcher_address;  // the store of this launcher alone; on one host the job's
  std::string secret;            // for that store; empty: it needs none
  std::string store_prefix;      // of the keys that the ranks use there; empty: all
  int ranks = 1;                 // here
  int first_rank = 0, world_size = 1;
  int node = 0, nodes = 1;
  int restarts = 0;  // of the job after failures, the same on all hosts
  // For scripts that bring their own TCPStore; nothing listens there now.
  std::string master_address = "127.0.0.1";
  int master_port = 0;
  UniqueFd master_socket;   // bound to this host's port, so that nobody else gets it
  bool terminal = false;    // whether standard error is a terminal that rank 0 may draw on
  int terminal_width = 80;  // for a rank's own text
};

// What names this host in the lines that its ranks print: its name up to the first dot, if there are several hosts.
std::string prefix_host(const LaunchOptions& options);
// A fresh id and store name, and a free port.
Job make_job(const LaunchOptions& options);
// Another free port. While the job holds it, the system gives it to no other process that asks for
// any port. A script can still listen there if it sets SO_REUSEADDR, as servers do.
void renew_master_port(Job& job);
// A port that is free now at an IPv4 address of this host. 29500, PyTorch's default, if there is no such address.
int free_port(const std::string& address = "127.0.0.1");

// "NAME=value" strings and the array of pointers to them that execve(2) takes.
class Environment {
 public:
  Environment();  // this process's
  void set(const std::string& name, const std::string& value);
  void unset(const std::string& name);
  bool has(const std::string& name) const;
  std::string get(const std::string& name) const;  // empty if it is not set
  char** block();                                  // valid until the next change

 private:
  std::vector<std::string>::iterator find(const std::string& name);
  std::vector<std::string> variables_;
  std::vector<char*> block_;
};

// What all ranks here share; set_rank() then makes it one rank's, whose black box is the descriptor `black_box`.
Environment job_environment(const Job& job, const LaunchOptions& options);
void set_rank(Environment& environment, const Job& job, int local_rank, int black_box);

}  // namespace muster::launch
