#include "support/etcd.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "base/random.h"
#include "base/text.h"
#include "launch/ranks/environment.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "support/patience.h"

namespace muster::test {
namespace {

constexpr const char* kProgram = "/usr/bin/etcd";

uint16_t free_port(const std::string& host) { return static_cast<uint16_t>(launch::free_port(host)); }

}  // namespace

bool Etcd::is_installed() { return ::access(kProgram, X_OK) == 0; }

Etcd::Etcd(int members, std::string host) : host_(std::move(host)) {
  // In memory where that can be: etcd waits for the disk at each change.
  const bool memory = std::filesystem::is_directory("/dev/shm");
  folder_ = std::filesystem::path(memory ? "/dev/shm" : "/tmp") / ("muster-etcd-" + random_hex(8));
  const auto patience = test::patience();
  do {
    for (size_t i = 0; i < members_.size(); ++i) kill_member(i);
    members_.clear();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    for (int i = 0; i < members; ++i) members_.push_back({free_port(host_), free_port(host_), 0});
    for (size_t i = 0; i < members_.size(); ++i) start_member(i);
  } while (!serves(patience));
}

// Whether it does; not where somebody else has taken one of the ports meanwhile, so that a member has ended.
bool Etcd::serves(Deadline patience) {
  for (;;) {
    try {
      connect_store(address("start"), Deadline::after(std::chrono::seconds(1)));
      return true;
    } catch (const Unavailable&) {
      if (patience.passed()) throw;
    }
    for (auto& member : members_)
      if (member.pid != 0 && ::waitpid(member.pid, nullptr, WNOHANG) == member.pid) {
        member.pid = 0;
        return false;
      }
  }
}

void Etcd::await_member(size_t member) {
  const auto patience = test::patience();
  for (;;) {
    try {
      connect_store(text("etcd://", host_, ":", members_[member].client_port, "/start"),
                    Deadline::after(std::chrono::seconds(1)))
          ->try_get("key");
      return;
    } catch (const Unavailable&) {
      if (patience.passed()) throw;
    }
  }
}

Etcd::~Etcd() {
  for (size_t i = 0; i < members_.size(); ++i) kill_member(i);
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::string Etcd::address(const std::string& prefix, size_t first) const {
  std::vector<std::string> endpoints;
  for (size_t i = 0; i < members_.size(); ++i)
    endpoints.push_back(text(host_, ":", members_[(first + i) % members_.size()].client_port));
  return text("etcd://", join(endpoints, ","), "/", prefix);
}

std::string Etcd::url(size_t member, const std::string& path) const {
  return text("http://", host_, ":", members_[member].client_port, path);
}

void Etcd::kill_member(size_t member) {
  pid_t& pid = members_[member].pid;
  if (pid == 0) return;
  ::kill(pid, SIGKILL);
  ::waitpid(pid, nullptr, 0);
  pid = 0;
}

void Etcd::start_member(size_t member) {
  const auto url = [this](uint16_t port) { return text("http://", host_, ":", port); };
  std::vector<std::string> cluster;
  for (size_t i = 0; i < members_.size(); ++i) cluster.push_back(text("m", i, "=", url(members_[i].peer_port)));
  const Member& own = members_[member];
  const std::vector<std::string> words = {kProgram,
                                          text("--name=m", member),
                                          text("--data-dir=", (folder_ / text("m", member)).string()),
                                          "--listen-client-urls=" + url(own.client_port),
                                          "--advertise-client-urls=" + url(own.client_port),
                                          "--listen-peer-urls=" + url(own.peer_port),
                                          "--initial-advertise-peer-urls=" + url(own.peer_port),
                                          "--initial-cluster=" + join(cluster, ","),
                                          "--max-request-bytes=20000000",
                                          "--heartbeat-interval=100",
                                          "--election-timeout=1000"};
  std::vector<char*> arguments;
  for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const std::string log = folder_ / text("m", member, ".log");
  const UniqueFd output(::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  const pid_t child = ::fork();
  if (child < 0) throw_errno("fork for etcd");
  if (child == 0) {  // only what a signal handler may do, as other threads may run
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::dup2(output.get(), STDOUT_FILENO);
    ::dup2(output.get(), STDERR_FILENO);
    ::execv(kProgram, arguments.data());
    ::_exit(127);
  }
  members_[member].pid = child;
}

}  // namespace muster::test
