// Remote calls over Muster: muster run -n 2 bench_rpc [--transport shm|tcp|ucx] [--case NAME]…
// Worker 0 calls, worker 1 serves. One JSON object per line.
//
//   echo_4B         a tensor of one float there and back, both sides busy
//   echo_int        the same with an int: no tensor
//   echo_4B_callee_asleep, echo_4B_asleep  the callee sleeps before each call; the caller was busy, or slept as well
//   wake_up         no call: another process sleeps in a futex, is woken and writes a word. This is the machine's part
//                   of the case before (impl "futex")
//   tcp_round_trip  no call: 64 bytes to another process and back, over TCP on the loopback interface, both blocking in
//                   recv (impl "socket")
//   echo_1MB, echo_16MB        an ordinary tensor there and back
//   echo_1MB_heap, …           one that lives on World::heap() and is moved in and out
//   pipelined       small calls with results, as many concurrently as the worker takes
//   future          no call: a promise is made and fulfilled
//   idle            the share of a core that worker 1 takes while no worker calls, over 5 s
//   mesh            all workers call all, with any number of workers: the KiB that each takes for it, on top
//                   of libtorch
#include <ATen/Parallel.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sum.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "measure.h"
#include "memory.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"
#include "transport/shm/inbox.h"

namespace {

namespace rpc = muster::rpc;
using Tensor = at::Tensor;

Tensor echo(Tensor x) { return x; }
int echo_int(int x) { return x; }

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string impl = "muster";

void row(const std::string& name, const char* unit, double value) {
  std::printf("{\"bench\": \"rpc\", \"case\": \"%s\", \"impl\": \"%s\", \"%s\": %.3f}\n", name.c_str(), impl.c_str(),
              unit, value);
  std::fflush(stdout);
}

// The median of 50 calls. This thread is busy, or sleeps, for 20 ms before each of them.
template <typename Call>
double after_a_pause_us(bool busy, Call call) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    const auto until = Clock::now() + std::chrono::milliseconds(20);
    if (!busy) std::this_thread::sleep_until(until);
    while (Clock::now() < until) {
    }
    const auto start = Clock::now();
    call();
    times.push_back(1e6 * std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + 25, times.end());
  return times[25];
}

void wake_up() {
  struct Words {
    std::atomic<uint32_t> asked{0}, answered{0};
  };
  void* const memory = ::mmap(nullptr, sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory to share");
  auto& words = *new (memory) Words;
  const pid_t child = ::fork();
  if (child == 0)
    for (uint32_t seen = 0;; words.answered = seen) {
      while (words.asked == seen) ::syscall(SYS_futex, &words.asked, FUTEX_WAIT, seen, nullptr, nullptr, 0);
      seen = words.asked;
    }
  const double us = after_a_pause_us(true, [&] {
    const uint32_t number = ++words.asked;
    ::syscall(SYS_futex, &words.asked, FUTEX_WAKE, 1, nullptr, nullptr, 0);
    while (words.answered != number) {
    }
  });
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  ::munmap(memory, sizeof(Words));
  std::printf("{\"bench\": \"rpc\", \"case\": \"wake_up\", \"impl\": \"futex\", \"us\": %.3f}\n", us);
}

void tcp_round_trip() {
  const auto checked = [](int result) {
    if (result < 0) throw std::runtime_error("no TCP connection to this host itself");
    return result;
  };
  const int listener = checked(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* const name = reinterpret_cast<sockaddr*>(&address);
  checked(::bind(listener, name, size));
  checked(::listen(listener, 1));
  checked(::getsockname(listener, name, &size));
  const auto without_delay = [&](int connection) {
    const int on = 1;
    checked(::setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
  };
  char bytes[64] = {};
  const auto send = [&](int connection) {
    return ::send(connection, bytes, sizeof bytes, MSG_NOSIGNAL) == sizeof bytes;
  };
  const auto receive = [&](int connection) {
    return ::recv(connection, bytes, sizeof bytes, MSG_WAITALL) == sizeof bytes;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    const int connection = ::socket(AF_INET, SOCK_STREAM, 0);
    if (::connect(connection, name, size) != 0) ::_exit(1);
    without_delay(connection);
    while (receive(connection) && send(connection)) {
    }
    ::_exit(0);
  }
  const int connection = checked(::accept(listener, nullptr, nullptr));
  without_delay(connection);
  const double seconds = bench::best_mean(
      3000,
      [&] {
        if (!send(connection) || !receive(connection)) throw std::runtime_error("the TCP connection broke");
      },
      [] {});
  ::close(connection);
  ::close(listener);
  ::waitpid(child, nullptr, 0);
  std::printf("{\"bench\": \"rpc\", \"case\": \"tcp_round_trip\", \"impl\": \"socket\", \"us\": %.3f}\n",
              1e6 * seconds);
}

template <typename Call>
void time_us(const std::string& name, int calls, Call call) {
  row(name, "us", 1e6 * bench::best_mean(calls, call, [] {}));
}

void run(const std::string& name, muster::World& world) {
  const Tensor small = at::ones({1});
  if (name == "echo_4B") return time_us(name, 3000, [&] { rpc::sync<&echo>(1, small); });
  if (name == "echo_int") return time_us(name, 3000, [] { rpc::sync<&echo_int>(1, 7); });
  if (name == "echo_4B_callee_asleep")
    return row(name, "us", after_a_pause_us(true, [&] { rpc::sync<&echo>(1, small); }));
  if (name == "echo_4B_asleep") return row(name, "us", after_a_pause_us(false, [&] { rpc::sync<&echo>(1, small); }));
  if (name == "future") return time_us(name, 100'000, [] { rpc::Promise<int>().try_set_value(1); });
  if (name == "wake_up") return wake_up();
  if (name == "tcp_round_trip") return tcp_round_trip();
  if (name == "pipelined") {
    const int calls = 20'000;
    std::vector<rpc::Future<int>> futures(calls);
    const double seconds = bench::best_mean(
        1,
        [&] {
          for (int i = 0; i < calls; ++i) futures[static_cast<size_t>(i)] = rpc::async<&echo_int>(1, i);
          for (int i = 0; i < calls; ++i)
            if (futures[static_cast<size_t>(i)].get() != i) throw std::runtime_error("a wrong answer");
        },
        [] {});
    return row(name, "per_s", calls / seconds);
  }
  if (name == "idle") {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    return;
  }
  const int64_t count = name.find("16MB") != std::string::npos ? 1 << 22 : 1 << 18;
  const int calls = count > 1 << 20 ? 20 : 200;
  if (name.find("heap") != std::string::npos) {
    Tensor x = world.heap().zeros({count});
    return time_us(name, 10'000, [&] { x = rpc::sync<&echo>(1, std::move(x)); });
  }
  const Tensor x = at::ones({count});
  time_us(name, calls, [&] { rpc::sync<&echo>(1, x); });
}

// Called by all workers. `without_rpc`: MiB of this one before rpc::init().
void mesh(muster::World& world, double without_rpc) {
  std::vector<rpc::Future<int>> answers;
  for (int round = 0; round < 3; ++round)
    for (int to = 0; to < world.world_size(); ++to) answers.push_back(rpc::async<&echo_int>(to, to));
  for (size_t i = 0; i < answers.size(); ++i)
    if (answers[i].get() != static_cast<int>(i) % world.world_size()) throw std::runtime_error("a wrong answer");
  muster::barrier();
  const Tensor grown = at::full({1}, bench::proportional_set_size() - without_rpc, at::kDouble);
  muster::all_reduce(grown);
  if (world.rank() != 0) return;
  // Pages of an inbox that nobody has mapped yet are taken all the same.
  using namespace muster::transport::shm_rings;
  const size_t inbox = inbox_bytes(world.world_size(), capacity_for(world.world_size()));
  const double kib = 1024 * grown.item<double>() / world.world_size() + static_cast<double>(inbox >> 10);
  row(std::to_string(world.world_size()) + " workers, all call all", "kb", kib);
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> cases = {
      "echo_4B",   "echo_int", "echo_4B_callee_asleep", "wake_up",   "tcp_round_trip", "echo_4B_asleep",
      "pipelined", "echo_1MB", "echo_1MB_heap",         "echo_16MB", "echo_16MB_heap", "future",
      "idle"};
  std::string transport = "auto";
  CLI::App app{"Remote calls over Muster"};
  app.add_option("--case", cases, "what to measure")->take_all();
  app.add_option("--transport", transport, "auto, shm, tcp, ucx or shm,ucx");
  app.add_option("--impl", impl, "the name in the rows");
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  auto world = muster::init();
  at::ones({3}).sum();
  muster::barrier();
  const double without_rpc = bench::proportional_set_size();
  muster::barrier();
  rpc::init({.transport = transport});
  for (const auto& name : cases) {
    if (name == "idle") muster::barrier();
    if (name == "mesh")
      mesh(world, without_rpc);
    else if (world.rank() == 0)
      run(name, world);
    if (name == "idle" && world.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      const double before = cpu_seconds();
      std::this_thread::sleep_for(std::chrono::seconds(5));
      row(name, "percent", 100 * (cpu_seconds() - before) / 5);
    }
    if (name == "idle") muster::barrier();
  }
  rpc::shutdown();
}
