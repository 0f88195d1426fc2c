// What the campaigns of faults have in common: their settings, and what a job may leave on the machine.
#pragma once

#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "base/fd.h"
#include "multiprocess/job_test.h"
#include "support/patience.h"

namespace muster::test {

inline int number(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

// Of MUSTER_CAMPAIGN_SEED, or another each time.
inline int campaign_seed() {
  return number("MUSTER_CAMPAIGN_SEED", static_cast<int>(std::random_device()() % 1'000'000));
}

// A place in which this test alone leaves traces: a folder for temporary files, and a network namespace, which has
// abstract sockets of its own. Other tests run at the same time.
class OwnPlace {
 public:
  OwnPlace() : folder_(std::filesystem::temp_directory_path() / text("campaign-", ::getpid())) {
    std::filesystem::create_directory(folder_);
    if (const char* const before = std::getenv("TMPDIR")) before_ = before;
    ::setenv("TMPDIR", folder_.c_str(), 1);
    own_sockets_ = ::unshare(CLONE_NEWNET) == 0 || ::unshare(CLONE_NEWUSER | CLONE_NEWNET) == 0;
    if (own_sockets_) {
      loopback_up();
    } else {
      std::cout << "no network namespace here: sockets that a job leaves are not looked for\n";
    }
  }
  OwnPlace(const OwnPlace&) = delete;
  OwnPlace& operator=(const OwnPlace&) = delete;
  ~OwnPlace() {
    if (before_) {
      ::setenv("TMPDIR", before_->c_str(), 1);
    } else {
      ::unsetenv("TMPDIR");
    }
    std::filesystem::remove_all(folder_);
  }

  // Waits until a job that has ended has left nothing.
  void expect_empty() const {
    const auto end = patience();
    auto left = traces();
    for (; !left.empty() && !end.passed(); left = traces()) ::poll(nullptr, 0, 5);
    for (const auto& trace : left) ADD_FAILURE() << trace << " is left";
  }

 private:
  static void loopback_up() {
    const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    ifreq request{};
    std::strncpy(request.ifr_name, "lo", IFNAMSIZ - 1);
    request.ifr_flags = IFF_UP | IFF_LOOPBACK | IFF_RUNNING;
    EXPECT_EQ(::ioctl(socket.get(), SIOCSIFFLAGS, &request), 0);
  }

  std::set<std::string> traces() const {
    std::set<std::string> found;
    std::ifstream sockets("/proc/net/unix");
    for (std::string line; own_sockets_ && std::getline(sockets, line);)
      if (const auto at = line.find("@muster-"); at != std::string::npos) found.insert(line.substr(at));
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) found.insert(entry.path().string());
    return found;
  }

  std::filesystem::path folder_;
  std::optional<std::string> before_;
  bool own_sockets_ = false;
};

}  // namespace muster::test
