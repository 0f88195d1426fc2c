// An etcd of the test's own: one or several members on free ports of the loopback, their data in a folder that goes
// away with them.
//
// Thread-safety: belongs to one thread.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <string>
#include <vector>

#include "base/fd.h"
#include "muster/base/deadline.h"

namespace muster::test {

class Etcd {
 public:
  static bool is_installed();

  // Starts the members, which listen at `host`, and waits until a majority answers.
  explicit Etcd(int members, std::string host = "127.0.0.1");
  Etcd(const Etcd&) = delete;
  Etcd& operator=(const Etcd&) = delete;
  ~Etcd();

  // For connect_store(): the members from `first` on, and then those before.
  std::string address(const std::string& prefix, size_t first = 0) const;
  std::string url(size_t member, const std::string& path) const;

  void kill_member(size_t member);
  void start_member(size_t member);  // again, with the data that it had
  void await_member(size_t member);  // until it answers, after a majority did
  pid_t pid(size_t member) const { return members_[member].pid; }

 private:
  bool serves(Deadline patience);
  struct Member {
    uint16_t client_port = 0, peer_port = 0;
    pid_t pid = 0;
  };
  const std::string host_;
  std::filesystem::path folder_;
  std::vector<Member> members_;
};

}  // namespace muster::test
