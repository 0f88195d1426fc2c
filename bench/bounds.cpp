// Measures what Muster promises in units of time and memory, and prints each figure with its bound, one JSON object per
// line: bench_bounds fault|idle|memory|copy… Tests assert the same promises by events, which a busy machine cannot
// disturb.
//
//   fault    the time from the end of a rank until the other ranks know it
//   idle     the share of a core that a rank takes while it waits; the cost of the black box per operation; a barrier
//            of far more ranks than cores
//   memory   the memory that a group's segment takes after the group has used everything that it can do
//   copy     how much longer copy_bytes() takes at some offset between source and destination than at none, in the first-
//            and second-level cache; and memcpy()
//
// The ranks are forks of this program. There is no launcher, because it would end the survivors of a lost rank.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/rpc/call.h"
#include "muster/rpc/this_call.h"
#include "muster/rpc/worker.h"
#include "muster/store/store.h"
#include "shm/black_box.h"

namespace {

using muster::Clock;
using muster::Deadline;
using muster::World;
using std::chrono::milliseconds;

Deadline patience() { return Deadline::after(std::chrono::minutes(5)); }
int64_t now_ns() { return Clock::now().time_since_epoch().count(); }  // the same clock in all processes

void print(const char* bench, const std::string& what, int ranks, double typical, double worst, double bound,
           const char* unit) {
  std::printf(R"({"bench": "%s", "what": "%s", "ranks": %d, "typical": %.4g, "worst": %.4g, "bound": %.4g, )"
              R"("unit": "%s"})"
              "\n",
              bench, what.c_str(), ranks, typical, worst, bound, unit);
  std::fflush(stdout);
}

// Prints the median and the longest of a list of nanoseconds, in milliseconds.
void print_ms(const char* bench, const std::string& what, int ranks, std::vector<int64_t> ns, double bound) {
  std::sort(ns.begin(), ns.end());
  print(bench, what, ranks, static_cast<double>(ns[ns.size() / 2]) / 1e6, static_cast<double>(ns.back()) / 1e6, bound,
        "ms");
}

// Numbers that the ranks write and this program reads.
class Numbers {
 public:
  explicit Numbers(size_t count)
      : bytes_(count * sizeof(std::atomic<int64_t>)),
        numbers_(static_cast<std::atomic<int64_t>*>(
            ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    if (numbers_ == MAP_FAILED) muster::throw_errno("mmap");
  }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { ::munmap(numbers_, bytes_); }
  std::atomic<int64_t>& operator[](size_t i) const { return numbers_[i]; }

 private:
  size_t bytes_;
  std::atomic<int64_t>* numbers_;
};

// A job of n forked ranks. This process serves the store.
class Job {
 public:
  Job(int n, const std::function<void(World&)>& body, const muster::WorldOptions& options = {})
      : server_(muster::serve_store()) {
    for (int rank = 0; rank < n; ++rank) {
      const pid_t pid = ::fork();
      if (pid < 0) muster::throw_errno("fork");
      if (pid == 0) run(rank, n, body, options);
      pids_.push_back(pid);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) end(static_cast<int>(rank), SIGKILL);
  }

  muster::Store& store() { return *server_->local(); }
  void signal(int rank, int number) const { ::kill(pids_[static_cast<size_t>(rank)], number); }

  // Sends the signal `number`, unless it is 0, and waits for the rank's end.
  void end(int rank, int number) {
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    if (pid == 0) return;
    if (number != 0) ::kill(pid, number);
    int status = 0;
    ::waitpid(pid, &status, 0);
    pid = 0;
    if (number == 0 && status != 0) throw std::runtime_error("rank " + std::to_string(rank) + " failed");
  }
  void wait_all() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) end(static_cast<int>(rank), 0);
  }

 private:
  [[noreturn]] void run(int rank, int n, const std::function<void(World&)>& body, const muster::WorldOptions& options) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    int status = 1;
    try {
      at::set_num_threads(1);
      World world({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n},
                  muster::connect_store(server_->address(), patience()), options);
      const World::Scope scope(world);
      body(world);
      status = 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    }
    ::_exit(status);
  }

  std::unique_ptr<muster::StoreServer> server_;
  std::vector<pid_t> pids_;
};

// --- fault ---

void until_cancelled() {
  World::current().store().set("called", "1");
  while (!muster::rpc::this_call().cancelled()) ::usleep(1000);
}

// SIGKILL at any moment of a loop of all_reduce.
void killed_in_a_collective() {
  constexpr int kRanks = 3, kTimes = 60;
  std::vector<int64_t> delays;
  std::mt19937 random(1);
  for (int time = 0; time < kTimes; ++time) {
    const auto victim = static_cast<int>(random() % kRanks);
    const int64_t count = int64_t{1} << (random() % 21);
    const Numbers done(kRanks), knew(kRanks);
    Job job(kRanks, [&](World& world) {
      const at::Tensor t = at::zeros({count});
      const auto me = static_cast<size_t>(world.rank());
      try {
        for (;; ++done[me]) muster::all_reduce(t);
      } catch (const muster::PeerLost&) {
        knew[me] = now_ns();
      }
    });
    for (size_t rank = 0; rank < kRanks; ++rank)
      while (done[rank] < 3) ::usleep(100);
    ::usleep(static_cast<useconds_t>(random() % 5000));
    const int64_t killed = now_ns();
    job.end(victim, SIGKILL);
    for (int rank = 0; rank < kRanks; ++rank) {
      if (rank == victim) continue;
      job.end(rank, 0);
      delays.push_back(knew[static_cast<size_t>(rank)] - killed);
    }
  }
  print_ms("fault", "a rank is killed in an all_reduce: the others know", kRanks, delays, 50);
}

void killed_before_its_message() {
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers knew(1);
    Job job(2, [&](World& world) {
      if (world.rank() == 1) {
        world.store().set("here", "1");
        world.store().get("nobody sets this", patience());
      }
      world.store().get("here", patience());
      try {
        muster::recv(at::zeros({10}), 1);
      } catch (const muster::PeerLost&) {
        knew[0] = now_ns();
      }
    });
    job.store().get("here", patience());
    ::usleep(20'000);  // rank 0 has long been waiting
    const int64_t killed = now_ns();
    job.end(1, SIGKILL);
    job.end(0, 0);
    delays.push_back(knew[0] - killed);
  }
  print_ms("fault", "a rank is killed: who waits for its message knows", 2, delays, 50);
}

void killed_with_a_call() {
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers knew(1);
    Job job(2, [&](World& world) {
      muster::rpc::init();
      if (world.rank() == 1) world.store().get("nobody sets this", patience());
      const auto call = muster::rpc::async<&until_cancelled>(1);
      try {
        call.get();
      } catch (const muster::PeerLost&) {
        knew[0] = now_ns();
      }
      muster::rpc::shutdown(muster::rpc::Shutdown::kAbrupt);
    });
    job.store().get("called", patience());
    ::usleep(20'000);  // rank 0 has long been waiting
    const int64_t killed = now_ns();
    job.end(1, SIGKILL);
    job.end(0, 0);
    delays.push_back(knew[0] - killed);
  }
  print_ms("fault", "a worker is killed: who has called it knows", 2, delays, 100);
}

void stopped() {
  constexpr int kRanks = 3;
  muster::WorldOptions options;
  options.timeout = milliseconds(200);
  options.faults.add({.action = muster::FaultAction::kStop, .rank = 1, .operation = 3});
  std::vector<int64_t> delays;
  for (int time = 0; time < 20; ++time) {
    const Numbers waited(kRanks);
    Job job(
        kRanks,
        [&](World& world) {
          const at::Tensor t = at::zeros({1000});
          int64_t began = 0;
          try {
            for (;;) {
              began = now_ns();
              muster::all_reduce(t);
            }
          } catch (const muster::TimeoutError&) {
            waited[static_cast<size_t>(world.rank())] = now_ns() - began;
          }
        },
        options);
    job.end(0, 0);
    job.end(2, 0);
    job.end(1, SIGKILL);
    delays.push_back(std::max<int64_t>(waited[0], waited[2]));
  }
  print_ms("fault", "a rank is stopped: a timeout of 200 ms comes after", kRanks, delays, 300);
}

void fault() {
  killed_in_a_collective();
  killed_before_its_message();
  killed_with_a_call();
  stopped();
}

// --- idle ---

int64_t cpu_ns() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);  // all threads of the process
  const auto ns = [](const timeval& time) { return time.tv_sec * 1'000'000'000 + time.tv_usec * 1000; };
  return ns(usage.ru_utime) + ns(usage.ru_stime);
}

// Rank 0 waits five seconds for an operation that rank 1 does not join: either in a call, or asleep while an operation
// is pending. All jobs wait at the same time.
void waiting() {
  constexpr int kSeconds = 5;
  struct Wait {
    const char* name;
    std::function<muster::Work()> start;  // on rank 0; empty if the call itself waits
    std::function<void()> call, answer;
  };
  const at::Tensor t = at::ones({1000}), large = at::ones({1'000'000});
  const std::vector<Wait> waits = {
      {"barrier", {}, [] { muster::barrier(); }, [] { muster::barrier(); }},
      {"all_reduce", {}, [&] { muster::all_reduce(large); }, [&] { muster::all_reduce(large); }},
      {"recv", {}, [&] { muster::recv(t, 1); }, [&] { muster::send(t, 0); }},
      {"send", {}, [&] { muster::send(large, 1); }, [&] { muster::recv(large, 0); }},
      {"wait of all_reduce_async", {}, [&] { muster::all_reduce_async(t).wait(); }, [&] { muster::all_reduce(t); }},
      {"wait of irecv", {}, [&] { muster::irecv(t, 1).wait(); }, [&] { muster::send(t, 0); }},
      {"pending all_reduce_async", [&] { return muster::all_reduce_async(t); }, {}, [&] { muster::all_reduce(t); }},
      {"pending irecv", [&] { return muster::irecv(t, 1); }, {}, [&] { muster::send(t, 0); }},
      {"pending isend", [&] { return muster::isend(large, 1); }, {}, [&] { muster::recv(large, 0); }},
  };
  const Numbers used(waits.size()), waited(waits.size());
  std::vector<std::unique_ptr<Job>> jobs;
  for (size_t i = 0; i < waits.size(); ++i)
    jobs.push_back(std::make_unique<Job>(2, [&, i](World& world) {
      for (int time = 0; time < 3; ++time) muster::all_reduce(at::ones({200'000}));  // so that the memory is allocated
      muster::barrier();
      if (world.rank() == 1) {
        ::sleep(kSeconds);
        if (waits[i].start) world.store().get("measured", patience());
        waits[i].answer();
        muster::barrier();
        return;
      }
      const int64_t cpu = cpu_ns(), began = now_ns();
      muster::Work work;
      if (waits[i].start) {
        work = waits[i].start();
        ::sleep(kSeconds);
      } else {
        waits[i].call();
      }
      used[i] = cpu_ns() - cpu;
      waited[i] = now_ns() - began;
      if (waits[i].start) {
        world.store().set("measured", "1");
        work.wait();
      }
      muster::barrier();
    }));
  for (size_t i = 0; i < waits.size(); ++i) {
    jobs[i]->wait_all();
    const double percent = 100 * static_cast<double>(used[i]) / static_cast<double>(waited[i]);
    print("idle", std::string("of a core while a rank waits: ") + waits[i].name, 2, percent, percent, 1, "%");
  }
}

void black_box() {
  const muster::UniqueFd memory = muster::shm::create_black_box(0, 1, "bench");
  const auto box = muster::shm::BlackBox::open(memory.get());
  const int group = box->group("world");
  // The best and the median of many batches.
  const auto batches = [](auto&& fn) {
    std::vector<double> ns;
    for (int batch = 0; batch < 200; ++batch) {
      const int64_t began = now_ns();
      for (int i = 0; i < 1000; ++i) fn();
      ns.push_back(static_cast<double>(now_ns() - began) / 1000);
    }
    std::sort(ns.begin(), ns.end());
    return std::pair(ns.front(), ns[ns.size() / 2]);
  };
  const auto clock = batches([] {
    volatile int64_t now = now_ns();
    static_cast<void>(now);
  });
  uint64_t sequence = 0;
  const auto both = batches([&] {
    box->end(box->begin({.group = group, .operation = 1, .bytes = 4096, .sequence = sequence++}),
             muster::shm::BlackBoxState::kDone);
  });
  // Machines differ in the cost of reading the clock; the rest is Muster's cost.
  print("idle", "black box, begin() and end(), without two readings of the clock", 1, both.second - 2 * clock.second,
        std::max(both.first - 2 * clock.first, both.second - 2 * clock.second), 50, "ns");
}

void barrier_of_many() {
  constexpr int kRanks = 64, kTimes = 200;
  const Numbers took(kTimes);
  muster::WorldOptions options;
  options.backend = "shm";
  Job job(
      kRanks,
      [&](World& world) {
        for (int i = 0; i < 10; ++i) muster::barrier();
        for (size_t i = 0; i < kTimes; ++i) {
          const int64_t began = now_ns();
          muster::barrier();
          if (world.rank() == 0) took[i] = now_ns() - began;
        }
      },
      options);
  job.wait_all();
  int64_t sum = 0, longest = 0;
  for (size_t i = 0; i < kTimes; ++i) {
    sum += took[i];
    longest = std::max<int64_t>(longest, took[i]);
  }
  // The mean, because the times of a rank vary: the rank that comes last waits for no other rank, and the next time for
  // all.
  print("idle", "barrier", kRanks, static_cast<double>(sum) / kTimes / 1e6, static_cast<double>(longest) / 1e6, 20,
        "ms");
}

void idle() {
  waiting();
  black_box();
  barrier_of_many();
}

// --- memory ---

// The size of this process's mappings of memfds with this name: the pages that exist, the pages that this process has
// touched (Rss), and the same divided among the processes that map them (Pss).
struct Memory {
  int64_t committed = 0, rss = 0, pss = 0;
};
Memory memory_of(const std::string& name) {
  Memory memory;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code error;
    const auto target = std::filesystem::read_symlink(entry.path(), error).string();
    struct stat info {};
    if (target.starts_with("/memfd:" + name) && ::stat(entry.path().c_str(), &info) == 0)
      memory.committed += info.st_blocks * 512;
  }
  std::ifstream maps("/proc/self/smaps");
  bool ours = false;
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string first;
    int64_t kib = 0;
    words >> first;
    if (first.find('-') != std::string::npos && first.back() != ':') {
      ours = line.find("/memfd:" + name) != std::string::npos;
    } else if (ours && words >> kib) {
      if (first == "Rss:") memory.rss += kib << 10;
      if (first == "Pss:") memory.pss += kib << 10;
    }
  }
  return memory;
}

// Runs every collective, in sizes that reach every tier, and sends messages from every rank to every other.
void use_everything(World& world) {
  const int n = world.world_size(), me = world.rank();
  const int64_t large = n <= 8 ? 1'000'000 : 300'000;
  for (const int64_t count : {int64_t{10}, int64_t{3000}, large}) {
    const int64_t part = std::max<int64_t>(1, count / n);
    const at::Tensor whole = at::ones({count}), mine = at::ones({part}), all = at::ones({part * n}),
                     other = at::zeros({part * n});
    std::vector<at::Tensor> parts(static_cast<size_t>(n), mine);
    muster::all_reduce(whole);
    muster::broadcast(whole, 0);
    muster::reduce(whole, 0);
    muster::all_gather_into_tensor(all, mine);
    muster::reduce_scatter_tensor(mine, all);
    muster::all_to_all_single(other, all);
    std::vector<at::Tensor> gathered;
    for (int rank = 0; me == 0 && rank < n; ++rank) gathered.push_back(at::zeros({part}));
    muster::gather(mine, gathered, 0);
    muster::scatter(mine, gathered, 0);
  }
  const at::Tensor out = at::ones({50'000}), in = at::zeros({50'000});
  for (int step = 0; step < n; ++step) {
    muster::Work receive = muster::irecv(in, (me + n - step) % n);
    muster::send(out, (me + step) % n);
    receive.wait();
  }
  muster::barrier();
}

void memory() {
  for (const auto& [n, bound] : {std::pair{2, 16}, std::pair{64, 64}}) {
    const Numbers numbers(static_cast<size_t>(3 * n));
    muster::WorldOptions options;
    options.backend = "shm";
    Job job(
        n,
        [&](World& world) {
          use_everything(world);
          const Memory memory = memory_of("muster-group");
          const auto me = static_cast<size_t>(world.rank());
          numbers[3 * me] = memory.committed;
          numbers[3 * me + 1] = memory.rss;
          numbers[3 * me + 2] = memory.pss;
          muster::barrier();  // no rank leaves before all have measured
        },
        options);
    job.wait_all();
    const char* const names[] = {"of the segment, for each rank", "that a rank has touched (Rss)",
                                 "that is a rank's share (Pss)"};
    for (size_t which = 0; which < 3; ++which) {
      std::vector<double> mb;
      for (size_t rank = 0; rank < static_cast<size_t>(n); ++rank)
        mb.push_back(static_cast<double>(numbers[3 * rank + which]) / 1e6 / (which == 0 ? n : 1));
      std::sort(mb.begin(), mb.end());
      // The memory that a rank has touched (Rss) has no bound of its own: it is at most the whole segment.
      print("memory", names[which], n, mb[mb.size() / 2], mb.back(), which == 1 ? double(bound) * n : bound, "MB");
    }
  }
}

// --- copy ---

template <typename Copy>
double seconds_of(std::byte* to, const std::byte* from, size_t bytes, Copy copy) {
  double best = 1;
  for (int round = 0; round < 5; ++round) {
    const auto calls = static_cast<int>((size_t{1} << 20) / bytes);
    const auto began = Clock::now();
    for (int i = 0; i < calls; ++i) {
      copy(to, from, bytes);
      asm volatile("" ::: "memory");  // the compiler must not drop a copy that the next one repeats
    }
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count() / calls);
  }
  return best;
}

void copy() {
  constexpr size_t kPage = 4096, kMost = 64 << 10;
  const auto room = [] {
    return std::unique_ptr<std::byte, decltype(&std::free)>(
        static_cast<std::byte*>(std::aligned_alloc(kPage, kMost + 2 * kPage)), &std::free);
  };
  const auto from = room(), to = room();
  std::fill_n(from.get(), kMost, std::byte{1});
  const auto walk = [&](const std::string& name, size_t bytes, double bound, auto copy) {
    const double aligned = seconds_of(to.get(), from.get(), bytes, copy);
    std::vector<double> ratios;
    for (size_t offset = 1; offset < kPage; offset += offset < 128 ? 1 : 61)
      ratios.push_back(seconds_of(to.get() + offset, from.get(), bytes, copy) / aligned);
    std::sort(ratios.begin(), ratios.end());
    print("copy", muster::text(name, " of ", bytes >> 10, " KiB at any offset"), 1, ratios[ratios.size() / 2],
          ratios.back(), bound, "times the aligned copy");
  };
  for (const size_t bytes : {size_t{4} << 10, size_t{16} << 10, kMost}) {
    walk("copy_bytes()", bytes, 6, [](auto* to, auto* from, size_t n) { muster::copy_bytes(to, from, n); });
    walk("memcpy(), for comparison,", bytes, 1000, [](auto* to, auto* from, size_t n) { std::memcpy(to, from, n); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> known = {
      {"fault", fault}, {"idle", idle}, {"memory", memory}, {"copy", copy}};
  std::vector<std::string> names;
  CLI::App app{"Muster's promises of time and memory, measured"};
  app.add_option("name", names, "fault, idle, memory, copy")
      ->required()
      ->check(CLI::IsMember({"fault", "idle", "memory", "copy"}));
  CLI11_PARSE(app, argc, argv);
  at::set_num_threads(1);
  for (const auto& name : names) known.at(name)();
}
