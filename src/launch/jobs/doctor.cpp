#include "launch/jobs/doctor.h"

#include <sched.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/cgroups.h"
#include "base/cores.h"
#include "base/env.h"
#include "base/fd.h"
#include "base/file_text.h"
#include "base/pidfd.h"
#include "base/text.h"
#include "launch/kit/text_table.h"
#include "launch/ranks/environment.h"

namespace muster::launch {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMiB = uint64_t{1} << 20, kGiB = uint64_t{1} << 30;

class Examination {
 public:
  Examination(const BuiltWith& built_with, fs::path root) : built_with_(built_with), root_(std::move(root)) {}

  std::vector<Finding> run() {
    versions();
    libtorch();
    cores();
    threads();
    load();
    memory();
    huge_pages();
    overcommit();
    limits();
    shared_memory();
    kernel();
    debugging();
    accelerators();
    return std::move(findings_);
  }

 private:
  void add(std::string name, std::string value, std::string advice = {}, Verdict verdict = Verdict::kNote) {
    if (advice.empty()) verdict = Verdict::kGood;
    findings_.push_back({std::move(name), std::move(value), verdict, std::move(advice)});
  }

  fs::path at(const std::string& path) const { return root_ / path; }
  // The file without the line end; nullopt if it cannot be read.
  std::optional<std::string> read(const fs::path& path) const {
    if (!std::ifstream(path)) return std::nullopt;
    std::string content = text_of_file(path);
    while (!content.empty() && content.back() == '\n') content.pop_back();
    return content;
  }
  std::optional<uint64_t> number(const fs::path& path) const {
    const auto content = read(path);
    if (!content) return std::nullopt;
    PlainInput in(*content);
    uint64_t value = 0;
    if (in >> value) return value;
    return std::nullopt;
  }
  // "advise" of "always [advise] never".
  std::optional<std::string> choice(const fs::path& path) const {
    const auto content = read(path);
    const auto open = content ? content->find('[') : std::string::npos;
    if (open == std::string::npos) return std::nullopt;
    return content->substr(open + 1, content->find(']', open) - open - 1);
  }
  // The smallest number that this file has in any of these folders. "max" does not count as a number.
  std::optional<uint64_t> least(const std::vector<fs::path>& folders, const std::string& file) const {
    std::optional<uint64_t> least;
    for (const auto& folder : folders)
      if (const auto limit = number(folder / file)) least = std::min(limit.value(), least.value_or(UINT64_MAX));
    return least;
  }
  uint64_t meminfo(const std::string& name) const {
    PlainInput lines(read(at("proc/meminfo")).value_or(""));
    for (std::string line; std::getline(lines, line);) {
      PlainInput words(line);
      std::string key;
      uint64_t kib = 0;
      if (words >> key >> kib && key == name + ':') return kib * 1024;
    }
    return 0;
  }

  void versions() {
    utsname system{};
    ::uname(&system);
    add("muster", built_with_.version);
    add("system", text(system.sysname, ' ', system.release, ' ', system.machine));
  }

  void libtorch() {
    std::error_code error;
    if (built_with_.libtorch.empty()) {
      add("libtorch", "none when this command was built",
          "Programs that train need libmuster: build Muster with libtorch");
      return;
    }
    const bool there = fs::exists(fs::path(built_with_.libtorch_folder) / "libtorch_cpu.so", error) ||
                       fs::exists(fs::path(built_with_.libtorch_folder) / "libtorch.so", error);
    add("libtorch", text(built_with_.libtorch, there ? ", in " + built_with_.libtorch_folder : ""),
        there ? ""
              : "The libtorch of the build is no longer where it was: programs need another one on their library path");
    const auto has = [&](const char* name) {
      return std::find(built_with_.backends.begin(), built_with_.backends.end(), name) != built_with_.backends.end();
    };
    add("backends", join(built_with_.backends),
        has("gloo") ? "" : "Without gloo there are no jobs over several hosts: install libgloo-dev and build again");
  }

  void cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    const long online = ::sysconf(_SC_NPROCESSORS_ONLN);
    const int allowed = ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(online);
    const double quota = cpu_quota(root_);
    std::string value = text(allowed, allowed == 1 ? " core" : " cores");
    std::string advice;
    if (allowed < online) value += text(" of ", online, " (affinity)");
    if (quota < allowed) {
      value += text(", ", fixed(quota, quota == static_cast<int>(quota) ? 0 : 1), " by the cgroup's quota");
      advice = text("More threads than ", fixed(std::max(1.0, quota), 0),
                    " are throttled; raise cpu.max (cpu.cfs_quota_us), or run at most so many ranks");
    }
    add("cores", value, advice);
  }

  void threads() {
    if (const auto threads = env_string("OMP_NUM_THREADS"))
      add("OMP_NUM_THREADS", *threads,
          "It is set here, so muster run leaves it: unset it for usable cores / ranks in each rank");
  }

  void load() {
    const auto words = read(at("proc/loadavg"));
    double load = 0;
    if (!words || !(PlainInput(*words) >> load)) return;
    const int cores = usable_cores();
    add("load", fixed(load, 1),
        load < 0.5 * cores
            ? ""
            : "Other work keeps the cores busy: ranks wait for each other, and figures are not to be trusted");
  }

  void memory() {
    const uint64_t total = meminfo("MemTotal"), available = meminfo("MemAvailable");
    if (total == 0) return;
    std::string value = text(human_bytes(total), ", ", human_bytes(available), " available"), advice;
    for (const auto& [folders, file] : {std::pair(own_cgroups(root_), "memory.max"),
                                        std::pair(own_memory_cgroups_v1(root_), "memory.limit_in_bytes")}) {
      const auto limit = least(folders, file);
      if (!limit || *limit >= total) continue;
      value += text(", limit of the cgroup ", human_bytes(*limit));
      advice = text("A rank that goes beyond the cgroup's limit is killed; shared heaps count too. Raise ", file);
    }
    if (available < kGiB / 2) advice = "Little memory is left: the kernel may kill ranks. End other programs";
    add("memory", value, advice, available < kGiB / 2 ? Verdict::kBad : Verdict::kNote);
  }

  void huge_pages() {
    const auto anonymous = choice(at("sys/kernel/mm/transparent_hugepage/enabled")),
               shared = choice(at("sys/kernel/mm/transparent_hugepage/shmem_enabled"));
    if (!anonymous && !shared) return;
    add("huge pages", text("for private memory: ", anonymous.value_or("?"), ", for shared: ", shared.value_or("?")),
        anonymous == "never" ? "Large tensors are faster with them: echo madvise > "
                               "/sys/kernel/mm/transparent_hugepage/enabled (as root)"
                             : "");
  }

  // Each rank maps every rank's heap, which is as large as the memory, but uses little of it.
  void overcommit() {
    if (number(at("proc/sys/vm/overcommit_memory")) == 2u)
      add("overcommit", "strict (2)",
          "A rank's heap may not be mapped. Set vm.overcommit_memory to 0, or WorldOptions::heap_capacity",
          Verdict::kBad);
    rlimit space{};
    if (::getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur != RLIM_INFINITY)
      add("address space", human_bytes(space.rlim_cur),
          "A rank maps all ranks' heaps, each as large as the memory. Use ulimit -v unlimited", Verdict::kBad);
  }

  void limits() {
    rlimit limit{};
    const auto words = [](rlim_t value) { return value == RLIM_INFINITY ? "unlimited" : text(value); };
    if (::getrlimit(RLIMIT_NOFILE, &limit) == 0)
      add("open files", text(words(limit.rlim_cur), ", at most ", words(limit.rlim_max)),
          limit.rlim_max < 4096 ? text("muster run needs 5 for each rank and 64 more: ",
                                       limit.rlim_max < 64 ? 0 : (limit.rlim_max - 64) / 5,
                                       " ranks can run. Raise the limit (ulimit -Hn)")
                                : "");
    if (::getrlimit(RLIMIT_NPROC, &limit) == 0) {
      const auto pids = least(own_cgroups(root_), "pids.max");
      const uint64_t least = std::min<uint64_t>(limit.rlim_cur, pids.value_or(UINT64_MAX));
      add("processes", least == UINT64_MAX ? "unlimited" : text(least),
          least < 1024 ? "Ranks and their threads count. Raise ulimit -u or the cgroup's pids.max" : "");
    }
    std::error_code error;
    const bool has_rdma =
        fs::exists(at("sys/class/infiniband"), error) && !fs::is_empty(at("sys/class/infiniband"), error);
    if (::getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
      add("memlock", limit.rlim_cur == RLIM_INFINITY ? "unlimited" : human_bytes(limit.rlim_cur),
          has_rdma && limit.rlim_cur != RLIM_INFINITY
              ? "There is RDMA hardware, whose libraries lock memory. Use ulimit -l unlimited"
              : "");
    if (::getrlimit(RLIMIT_CORE, &limit) == 0) add("core dumps", limit.rlim_cur == 0 ? "off" : words(limit.rlim_cur));
  }

  void shared_memory() {
    struct statvfs space {};
    const auto folder = at("dev/shm");
    if (::statvfs(folder.c_str(), &space) != 0) {
      add("/dev/shm", "not there", "Muster needs none, but data loaders of PyTorch do. Mount a tmpfs there");
      return;
    }
    const uint64_t size = uint64_t{space.f_frsize} * space.f_blocks, left = uint64_t{space.f_frsize} * space.f_bavail;
    add("/dev/shm", text(human_bytes(size), ", ", human_bytes(left), " free"),
        left < 256 * kMiB ? "Muster needs none, but data loaders of PyTorch do. Containers: --shm-size=1g" : "");
  }

  // What shared memory without names and the watch over peers need, tried out.
  void kernel() {
    const UniqueFd memory(::memfd_create("muster-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const UniqueFd process = open_pidfd(::getpid());
    const UniqueFd socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    std::vector<std::string> missing;
    if (!memory) missing.push_back("memfd_create");
    if (!process) missing.push_back("pidfd_open");
    if (!socket) missing.push_back("Unix sockets");
    add("kernel", missing.empty() ? "memfd, pidfd and Unix sockets work" : text("does not give ", join(missing)),
        missing.empty() ? "" : "Muster cannot work without: Linux 5.4 or later, and a sandbox that allows them",
        Verdict::kBad);
  }

  void debugging() {
    if (const auto scope = number(at("proc/sys/kernel/yama/ptrace_scope")))
      add("ptrace", text("scope ", *scope),
          *scope == 0 || ::geteuid() == 0 ? ""
                                          : "A debugger cannot attach to a rank: sysctl kernel.yama.ptrace_scope=0");
    if (const auto level = read(at("proc/sys/kernel/perf_event_paranoid")))
      add("perf", text("paranoid ", *level),
          std::atoi(level->c_str()) <= 2 || ::geteuid() == 0
              ? ""
              : "perf cannot look at a rank: sysctl kernel.perf_event_paranoid=2");
  }

  void accelerators() {
    std::error_code error;
    int devices = 0;
    for (const auto& entry : fs::directory_iterator(at("dev"), error)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("nvidia") && name.size() > 6 && std::isdigit(static_cast<unsigned char>(name[6]))) ++devices;
    }
    if (devices == 0) return;
    const auto has_nccl =
        std::find(built_with_.backends.begin(), built_with_.backends.end(), "nccl") != built_with_.backends.end();
    add("NVIDIA devices", text(devices),
        has_nccl ? ""
                 : "This Muster has no nccl backend. Build it with a libtorch for CUDA, nccl.h and the CUDA toolkit");
  }

  const BuiltWith& built_with_;
  const fs::path root_;
  std::vector<Finding> findings_;
};

const char* name_of(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "good";
    case Verdict::kNote:
      return "note";
    case Verdict::kBad:
      break;
  }
  return "bad";
}

}  // namespace

std::vector<Finding> examine(const BuiltWith& built_with, const fs::path& root) {
  return Examination(built_with, root).run();
}

std::string findings_table(const std::vector<Finding>& findings) {
  std::vector<std::vector<std::string>> rows;
  for (const auto& finding : findings)
    rows.push_back({finding.name, finding.verdict == Verdict::kGood ? "" : name_of(finding.verdict), finding.value});
  PlainInput lines(aligned(rows, {false, false, false}));
  std::string out;
  size_t index = 0;
  for (std::string line; std::getline(lines, line); ++index) {
    out += line + '\n';
    if (!findings[index].advice.empty()) out += text("    => ", findings[index].advice, '\n');
  }
  const auto count = [&](Verdict verdict) {
    return std::count_if(findings.begin(), findings.end(), [&](const auto& f) { return f.verdict == verdict; });
  };
  return out + text('\n', count(Verdict::kBad), " bad, ", count(Verdict::kNote), " worth knowing, ",
                    count(Verdict::kGood), " good\n");
}

std::string findings_json(const std::vector<Finding>& findings) {
  auto document = nlohmann::json::array();
  for (const auto& finding : findings)
    document.push_back({{"name", finding.name},
                        {"value", finding.value},
                        {"verdict", name_of(finding.verdict)},
                        {"advice", finding.advice}});
  return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + '\n';
}

bool any_bad(const std::vector<Finding>& findings) {
  return std::any_of(findings.begin(), findings.end(), [](const auto& f) { return f.verdict == Verdict::kBad; });
}

}  // namespace muster::launch
