// What the tests of the launcher start as ranks: one program, whose first argument says how it behaves. failures.h has
// the behaviours that end badly.
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "multiprocess/launch_programs/failures.h"
#include "multiprocess/launch_programs/rank.h"
#include "muster/launch/launcher.h"
#include "muster/store/store.h"
#include "shm/black_box.h"
#include "support/network_sockets.h"
#include "support/patience.h"

namespace {

using muster::text;
namespace test = muster::test;
using namespace launch_program;

int print_environment(const Arguments&) {
  for (char** variable = environ; *variable; ++variable) say(*variable);
  return 0;
}

int flood(const Arguments& arguments) {
  const int lines = std::atoi(arguments.at(0).c_str());
  const std::string padding(40 + rank(), static_cast<char>('a' + rank()));
  for (int line = 0; line < lines; ++line) std::printf("%d %d %s\n", rank(), line, padding.c_str());
  return 0;
}

// Writes its second argument, with \r and \n as they are in C, to standard output or, as "err", to standard error.
int write_bytes(const Arguments& arguments) {
  std::string bytes;
  for (size_t at = 0; at < arguments.at(1).size(); ++at) {
    const auto& from = arguments[1];
    if (from[at] == '\\' && at + 1 < from.size()) {
      bytes += from[++at] == 'n' ? '\n' : from[at] == 'r' ? '\r' : from[at] == '0' ? '\0' : from[at];
    } else {
      bytes += from[at];
    }
  }
  const int fd = arguments[0] == "err" ? STDERR_FILENO : STDOUT_FILENO;
  return ::write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()) ? 0 : 1;
}

int long_line(const Arguments& arguments) {
  const int size = std::atoi(arguments.at(0).c_str());
  for (int i = 0; i < size; ++i) std::putchar('a' + i % 26);
  std::putchar('\n');
  return 0;
}

int every_byte(const Arguments&) {
  for (int i = 0; i < 4096; ++i) std::putchar((i * 37) & 255);
  return 0;
}

// wait-for FILE [RANK]: all meet, say so, and end well when the file is there; with RANK, that one then exits with
// status 3, and the others stay.
int wait_for_file(const Arguments& arguments) {
  meet("wait-for");
  say(text("rank ", rank(), " of ", number("WORLD_SIZE"), " waits on node ", number("GROUP_RANK"), " of ",
           number("GROUP_WORLD_SIZE")));
  for (const auto deadline = test::patience(); !deadline.passed(); ::poll(nullptr, 0, 5))
    if (::access(arguments.at(0).c_str(), F_OK) == 0)
      return arguments.size() == 1 ? 0 : rank() == std::atoi(arguments[1].c_str()) ? 3 : stay();
  return 99;
}

// sum NUMBER FILE: all add to one sum, that number for rank 0, twice that for rank 1 and so on, say
// that they are ready, and say the sum when the file is there.
int sum(const Arguments& arguments) {
  const auto store = muster::connect_job_store(test::patience());
  store->add("sum", std::atoi(arguments.at(0).c_str()) * (rank() + 1));
  meet("summed");
  say("ready");
  for (const auto deadline = test::patience(); ::access(arguments.at(1).c_str(), F_OK) != 0; ::poll(nullptr, 0, 5))
    if (deadline.passed()) return 99;
  say(text("rank ", rank(), " of ", number("WORLD_SIZE"), ", sum ", store->add("sum", 0), ", port ",
           number("MASTER_PORT")));
  meet("seen");
  return 0;
}

// count-until FILE: all meet and then add to one sum, without a pause but those of the store, until the file is there;
// fails unless each has counted once.
int count_until(const Arguments& arguments) {
  const auto store = muster::connect_job_store(test::patience());
  meet("count-until");
  say(text("rank ", rank(), " counts"));
  int64_t own = 0;
  for (const auto deadline = test::patience(); ::access(arguments.at(0).c_str(), F_OK) != 0; ++own) {
    if (deadline.passed()) return 99;
    store->add("sum", 1);
    ::poll(nullptr, 0, 1);
  }
  store->add("own", own);
  meet("counted");
  const auto all = store->add("own", 0), sum = store->add("sum", 0);
  say(text("rank ", rank(), " sees ", sum, " of ", all));
  meet("seen");
  return sum == all ? 0 : 98;
}

// Says which signals come; SIGUSR2 ends it well; with "well", so do the others. With "stubborn", nothing but SIGUSR2
// and SIGKILL ends it.
int tell_signals(const Arguments& arguments) {
  sigset_t all;
  ::sigemptyset(&all);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGQUIT}) ::sigaddset(&all, signal);
  ::sigprocmask(SIG_BLOCK, &all, nullptr);
  meet("signals");
  say("ready");
  for (;;) {
    const timespec long_enough{kStays, 0};
    const int signal = ::sigtimedwait(&all, nullptr, &long_enough);
    if (signal < 0) return 99;
    say(text("got ", ::sigabbrev_np(signal)));
    if (signal == SIGUSR2 || (signal != SIGUSR1 && !arguments.empty() && arguments[0] == "well")) return 0;
    if (signal != SIGUSR1 && arguments.empty()) return 5;
  }
}

// A child in the rank's group and one in a session of its own, which leaves a grandchild; then "end", "fail" or stay.
int make_family(const Arguments& arguments) {
  if (::fork() == 0) return stay();
  if (::fork() == 0) {
    ::setsid();
    if (::fork() == 0) return stay();
    return stay();
  }
  meet("family");
  say("ready");
  if (arguments.empty()) return stay();
  return arguments[0] == "fail" && rank() == 0 ? 4 : 0;
}

// The launcher's sockets, and how many of them are of a network.
int count_sockets(const Arguments&) {
  meet("sockets");
  say(text("sockets ", test::sockets_of(::getppid()).empty() ? "none" : "some", ", network ",
           test::network_sockets_of(::getppid()).size()));
  return 0;
}

// Whether a server can listen at the job's port that does not set SO_REUSEADDR, and one that does.
int use_port(const Arguments&) {
  for (const int reuse : {0, 1}) {
    const muster::UniqueFd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(number("MASTER_PORT")));
    ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &reuse, sizeof reuse);
    const bool listens = ::bind(socket.get(), reinterpret_cast<const sockaddr*>(&any), sizeof any) == 0 &&
                         ::listen(socket.get(), 1) == 0;
    say(text(reuse ? "reuse: " : "plain: ", listens ? "listens" : ::strerrorname_np(errno)));
  }
  return 0;
}

int list_descriptors(const Arguments&) {
  for (int fd = 0; fd < 4096; ++fd)
    if (::fcntl(fd, F_GETFD) >= 0) say(fd == number(muster::shm::kBlackBoxVariable) ? "black box" : text("fd ", fd));
  return 0;
}

int print_signal_state(const Arguments&) {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("Sig") || line.starts_with("ShdPnd")) say(line);
  return 0;
}

int echo_input(const Arguments&) {
  std::string line;
  if (std::getline(std::cin, line)) {
    say("read " + line);
  } else {
    say("no input");
  }
  return 0;
}

// A bar of rank 0 on the terminal; at SIGUSR1 a line of rank 1 over it; at SIGUSR2 the bar's last state.
int bar_and_line(const Arguments&) {
  const auto write = [](const char* bytes) {
    if (::write(STDERR_FILENO, bytes, std::strlen(bytes)) < 0) std::abort();
  };
  sigset_t ours;
  ::sigemptyset(&ours);
  for (const int signal : {SIGUSR1, SIGUSR2}) ::sigaddset(&ours, signal);
  ::sigprocmask(SIG_BLOCK, &ours, nullptr);
  meet("blocked");
  if (rank() == 0) write("\rbar 50%\x1b[K");
  for (;;) {
    const timespec long_enough{kStays, 0};
    const int signal = ::sigtimedwait(&ours, nullptr, &long_enough);
    if (signal < 0) return 99;
    if (signal == SIGUSR1 && rank() == 1) say("a line");
    if (signal == SIGUSR2 && rank() == 0) write("\rbar 100%\x1b[K\n");
    if (signal == SIGUSR2) return 0;
  }
}

// launch_function() with its output through this process, as a program with spawn() has it.
int function_main(const Arguments& arguments) {
  const auto& what = arguments.at(0);
  muster::launch::LaunchOptions options;
  if (what == "prefixed") options.output = muster::launch::RankOutput::kPrefixed;
  if (what == "logs") options.log_folder = arguments.at(1);
  std::cout << "before" << (what == "stay" ? "\n" : "");  // still in our buffer when the ranks are forked
  const auto outcome = muster::launch::launch_function(
      2,
      [&] {
        meet("function");
        if (what == "stay") {
          say("ready");
          return stay();
        }
        std::cout << "out of " << rank() << "\n";
        std::fprintf(stderr, "err of %d\n", rank());
        return 0;
      },
      options);
  say("after");
  return outcome.status;
}

// black-box HOW: five all_reduces, and then
//   stall   rank 0 waits in the sixth and for a message; the others receive in another group; all stay
//   die     all are in the sixth, and the last rank is killed there
//   alone   as stall, without other ranks
//   end     no more
//   train   no more, and reports 3 steps of 64 samples; all stay
int use_black_box(const Arguments& arguments) {
  const auto& how = arguments.at(0);
  const int size = number("WORLD_SIZE");
  const auto box = muster::shm::open_black_box(rank(), size);
  static constexpr std::string_view kOperations[] = {"all_reduce", "recv"}, kDtypes[] = {"Float"};
  box->set_names(kOperations, kDtypes);
  std::vector<int> ranks;
  for (int other = 0; other < size; ++other) ranks.push_back(other);
  const int world = box->group("world", ranks), pipe = box->group("pipe", ranks);
  const auto all_reduce = [&](uint64_t sequence) {
    return box->begin({.group = world, .bytes = 1'258'291, .sequence = sequence});
  };
  for (uint64_t sequence = 0; sequence < 5; ++sequence)
    box->end(all_reduce(sequence), muster::shm::BlackBoxState::kDone);
  if (how == "end") return 0;
  if (how == "train") {
    for (uint64_t step = 1; step <= 3; ++step) box->report(step, step * 64);
    meet("black-box");
    say("ready");
    return stay();
  }
  if (how == "die" || rank() == 0) all_reduce(5);
  if (how != "die") box->begin({.group = pipe, .operation = 1, .bytes = 8, .peer = rank() == 0 ? 1 : 0, .tag = 7});
  if (how != "alone") meet("black-box");
  say("ready");
  if (how == "die" && rank() == size - 1) ::raise(SIGKILL);
  return stay();
}

}  // namespace

int main(int argc, char** argv) {
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const std::map<std::string, Behaviour> behaviours{
      {"nothing", [](const Arguments&) { return 0; }},
      {"environment", print_environment},
      {"flood", flood},
      {"write", write_bytes},
      {"long-line", long_line},
      {"every-byte", every_byte},
      {"wait-for", wait_for_file},
      {"count-until", count_until},
      {"sum", sum},
      {"signals", tell_signals},
      {"family", make_family},
      {"sockets", count_sockets},
      {"port", use_port},
      {"descriptors", list_descriptors},
      {"signal-state", print_signal_state},
      {"input", echo_input},
      {"bar", bar_and_line},
      {"function", function_main},
      {"black-box", use_black_box},
  };
  const std::string name = argc > 1 ? argv[1] : "";
  for (const auto* all : {&behaviours, &failures()})
    if (const auto behaviour = all->find(name); behaviour != all->end())
      return behaviour->second(Arguments(argv + 2, argv + argc));
  std::cerr << "launch_program: no such behaviour" << std::endl;
  return 97;
}
