#include "multiprocess/launch_programs/failures.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/crash_report.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "support/patience.h"

namespace {

using muster::Deadline;
using muster::text;
namespace test = muster::test;
using namespace launch_program;

// fail RANK STATUS: all meet, that rank prints 30 lines and exits, the others stay, with "stubborn" in spite of
// SIGTERM.
int fail(const Arguments& arguments) {
  if (arguments.size() > 2) ::signal(SIGTERM, SIG_IGN);
  meet("fail");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  for (int line = 0; line < 30; ++line) std::cerr << "trouble " << line << std::endl;
  say("failing");
  return std::atoi(arguments.at(1).c_str());
}

// fail-until ATTEMPT RANK: all meet; before that attempt the rank exits with status 3, the others stay; then all end
// well.
int fail_until(const Arguments& arguments) {
  const int attempt = number("TORCHELASTIC_RESTART_COUNT");
  meet("fail-until");
  say(text("attempt ", attempt, " of rank ", rank(), " of ", number("WORLD_SIZE")));
  meet("said");
  if (attempt >= std::atoi(arguments.at(0).c_str())) return 0;
  if (rank() != std::atoi(arguments.at(1).c_str())) return stay();
  std::cerr << "no luck in attempt " << attempt << std::endl;
  return 3;
}

// eat RANK: all meet, and that rank touches more and more memory until the kernel ends it, or it
// has a gigabyte.
int eat(const Arguments& arguments) {
  meet("eat");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  constexpr size_t kPiece = size_t{1} << 20;
  for (int piece = 0; piece < 1024; ++piece) {
    void* memory = ::mmap(nullptr, kPiece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 98;
    std::memset(memory, 1, kPiece);
  }
  return 97;
}

int throw_in_rank(const Arguments& arguments) {
  meet("throw");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  throw std::runtime_error("the disk is full");
}

// Rank 0 throws PeerLost, and only when the launcher must have learned of that does rank 1 show that it was the cause.
int echo_first(const Arguments&) {
  meet("echo");
  const auto parent = text("/proc/", ::getppid(), "/task/", ::getppid(), "/children");
  if (rank() == 0) throw muster::PeerLost(1, 0, "rank 1 went away");
  std::ifstream children(parent);
  std::vector<pid_t> siblings;
  for (pid_t child = 0; children >> child;) siblings.push_back(child);
  for (const auto deadline = test::patience(); !deadline.passed(); ::poll(nullptr, 0, 1)) {
    for (const pid_t sibling : siblings) {
      std::ifstream stat(text("/proc/", sibling, "/stat"));
      std::string line;
      std::getline(stat, line);
      if (line.find(") Z ") == std::string::npos) continue;
      return 7;
    }
  }
  return 98;
}

int die(const Arguments& arguments) {
  meet("die");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  ::raise(std::atoi(arguments.at(1).c_str()));
  return 0;
}

// Neither inlined nor specialised, and with names that a stack shows.
__attribute__((noipa)) int follow_bad_pointer(volatile int* pointer) { return *pointer + 1; }
__attribute__((noipa)) int divide(int by) { return 7 / by; }
__attribute__((noipa)) int recurse(int depth) {
  volatile char room[4096];
  room[0] = static_cast<char>(depth);
  return depth < 0 ? 0 : recurse(depth + 1) + room[0];
}

// crash RANK HOW: all meet, and that rank dies of a fault, with last words.
int crash(const Arguments& arguments) {
  muster::install_crash_report();
  meet("crash");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  std::cerr << "a line before" << std::endl;
  const auto& how = arguments.at(1);
  if (how == "segv") return follow_bad_pointer(nullptr);
  if (how == "fpe") return divide(0);
  if (how == "overflow") return recurse(0);
  if (how == "abort") std::abort();
  if (how == "throw") throw std::runtime_error("the disk is full");
  if (how == "ill") __builtin_trap();
  if (how == "jump") return reinterpret_cast<int (*)()>(0x10)();
  if (how == "bus") {
    const int fd = ::memfd_create("bus", MFD_CLOEXEC);
    if (::ftruncate(fd, 4096) != 0) return 98;
    auto* page = static_cast<volatile int*>(::mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0));
    if (::ftruncate(fd, 0) != 0) return 98;
    return follow_bad_pointer(page);
  }
  if (how == "thread") std::thread([] { follow_bad_pointer(nullptr); }).join();
  if (how == "sent") ::kill(::getpid(), SIGSEGV);
  if (how == "both") {  // concurrently, in several threads
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i) threads.emplace_back([] { follow_bad_pointer(nullptr); });
    for (auto& thread : threads) thread.join();
  }
  return 97;
}

// campaign FAULT RANK MICROSECONDS: all meet and use the store; that rank, after that time, brings the fault about.
int campaign(const Arguments& arguments) {
  muster::install_crash_report();
  const std::string& fault = arguments.at(0);
  const bool victim = rank() == std::atoi(arguments.at(1).c_str());
  const auto store = muster::connect_job_store(test::patience());
  meet("campaign");
  const auto when = Deadline::after(std::chrono::microseconds(std::atoi(arguments.at(2).c_str())));
  while (!victim || !when.passed()) {
    store->add("steps", 1);
    if (fault == "stop" && !victim)
      store->get("a word of the rank that stands still", Deadline::after(std::chrono::milliseconds(300)));
  }
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "term") ::raise(SIGTERM);
  if (fault == "stop") ::raise(SIGSTOP);
  if (fault == "throw") throw std::runtime_error("the disk is full");
  if (fault == "exit") return 3;
  if (fault == "segv") return follow_bad_pointer(nullptr);
  if (fault == "overflow") return recurse(0);
  if (fault == "abort") std::abort();
  if (fault == "full") {  // of what it may write
    const rlimit limit{4096, 4096};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const int fd = ::memfd_create("full", MFD_CLOEXEC);
    const std::string page(8192, 'x');
    while (::write(fd, page.data(), page.size()) >= 0) {
    }
  }
  if (fault == "launcher-kill") ::kill(::getppid(), SIGKILL);
  if (fault == "launcher-term") ::kill(::getppid(), SIGTERM);
  return stay();
}

// error RANK: that rank writes its error file, as Python's record() does, and fails.
int write_error(const Arguments& arguments) {
  meet("error");
  if (rank() != std::atoi(arguments.at(0).c_str())) return stay();
  std::ofstream(std::getenv("TORCHELASTIC_ERROR_FILE"))
      << R"({"message": {"message": "RuntimeError: no more paper", "extraInfo": {"timestamp": "1"}}})";
  return 1;
}

}  // namespace

const std::map<std::string, Behaviour>& launch_program::failures() {
  static const std::map<std::string, Behaviour> all{
      {"fail", fail},           {"fail-until", fail_until}, {"eat", eat},
      {"throw", throw_in_rank}, {"echo-first", echo_first}, {"die", die},
      {"crash", crash},         {"campaign", campaign},     {"error", write_error},
  };
  return all;
}
