// The smallest program with remote calls: worker 0 calls worker 1, and prints how long that takes.
//
//   muster run -n 2 rpc_ping
#include <chrono>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "muster/comm/world.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/this_call.h"

namespace rpc = muster::rpc;

namespace {

std::string greet(std::string name) { return "hello " + name + ", this is " + rpc::worker_info().name; }

// Lives on worker 1. Every worker that has an RRef to it may add lines, several of them concurrently.
class Guestbook {
 public:
  int sign(std::string line) {
    const std::lock_guard lock(mutex_);
    lines_.push_back(rpc::this_call().caller().name + ": " + line);
    return static_cast<int>(lines_.size());
  }
  std::vector<std::string> read() const {
    const std::lock_guard lock(mutex_);
    return lines_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> lines_;
};

}  // namespace

int main() {
  auto world = muster::init();
  rpc::init();
  if (world.rank() == 0 && world.world_size() > 1) {
    std::puts(rpc::sync<&greet>("worker1", std::string("worker0")).c_str());

    constexpr int kCalls = 10'000;
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; ++i) rpc::sync<[](int x) { return x; }>("worker1", i);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("%d calls, one after another: %.1f us each\n", kCalls, took.count() / kCalls);

    const auto book = rpc::remote<Guestbook>("worker1");
    book.sync<&Guestbook::sign>(std::string("was here"));
    for (const std::string& line : book.sync<&Guestbook::read>()) std::puts(line.c_str());
  }
  rpc::shutdown();
}
