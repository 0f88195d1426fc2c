#include "launch/black_box/black_box_sources.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <system_error>
#include <tuple>
#include <utility>

#include "base/atomic_file.h"
#include "base/byte_stream.h"
#include "base/fd.h"
#include "base/file_text.h"
#include "base/process.h"
#include "base/text.h"
#include "launch/kit/process_info.h"
#include "muster/base/error.h"

namespace muster::launch {
namespace {

constexpr std::string_view kMagic = "MUSTERBX";
constexpr uint64_t kFormat = 1;

// The numbers among the names in a folder.
std::vector<int> numbers_in(const std::string& folder) {
  std::vector<int> numbers;
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(folder.c_str()), ::closedir);
  while (const dirent* entry = entries ? ::readdir(entries.get()) : nullptr) {
    int number = 0;
    const char* end = entry->d_name + std::strlen(entry->d_name);
    if (std::from_chars(entry->d_name, end, number).ptr == end) numbers.push_back(number);
  }
  return numbers;
}

struct Found {
  shm::BlackBoxSnapshot box;
  std::set<pid_t> holders;  // processes that have it open
};

// All boxes that processes of this user have open.
std::vector<Found> find_all() {
  std::map<std::pair<dev_t, ino_t>, Found> found;
  const auto wanted = text("/memfd:", shm::kBlackBoxName);
  for (const pid_t pid : numbers_in("/proc")) {
    if (pid == ::getpid()) continue;
    const auto folder = text("/proc/", pid, "/fd");
    for (const int number : numbers_in(folder)) {  // none if the process is another user's, or has ended meanwhile
      const auto link = text(folder, '/', number);
      char target[64] = {};
      if (::readlink(link.c_str(), target, sizeof target - 1) < 0) continue;
      if (!std::string_view(target).starts_with(wanted)) continue;
      const UniqueFd fd(::open(link.c_str(), O_RDONLY | O_CLOEXEC));
      struct stat info {};
      if (!fd || ::fstat(fd.get(), &info) != 0) continue;
      const std::pair identity(info.st_dev, info.st_ino);
      const auto known = found.find(identity);
      if (known != found.end()) {
        known->second.holders.insert(pid);
        continue;
      }
      try {
        found[identity] = {shm::read_black_box(fd.get()), {pid}};
      } catch (const Error&) {
        found.erase(identity);  // a memfd of that name that is not Muster's
      }
    }
  }
  std::vector<Found> boxes;
  for (auto& [identity, box] : found) boxes.push_back(std::move(box));
  return boxes;
}

std::string state_of_process(const shm::BlackBoxSnapshot& box) {
  if (box.pid == 0) return "not come";
  return start_time_of(box.pid) == box.pid_start ? state_in_words(process_state(box.pid)) : "gone";
}

// Drops the box that a launcher made for a rank, if the rank did not use it and has a box of its own.
void drop_unused(std::vector<RankBox>& ranks) {
  std::set<int> used;
  for (const auto& rank : ranks)
    if (rank.box.pid != 0) used.insert(rank.box.rank);
  std::erase_if(ranks, [&](const RankBox& rank) { return rank.box.pid == 0 && used.contains(rank.box.rank); });
}

// Numbers the groups of one name and members in the order in which the ranks came to them.
void name_groups(std::vector<RankBox>& ranks) {
  std::vector<shm::BlackBoxSnapshot*> boxes;
  for (auto& rank : ranks) boxes.push_back(&rank.box);
  std::stable_sort(boxes.begin(), boxes.end(),
                   [](const auto* a, const auto* b) { return a->created_ns < b->created_ns; });
  using Name = std::tuple<std::string, uint64_t, uint64_t>;
  using Meeting = std::pair<uint64_t, int>;  // and how many with this number came before in the same box
  std::map<Name, std::map<Meeting, int>> numbers;
  for (auto* const box : boxes) {
    std::map<std::pair<Name, uint64_t>, int> times;
    for (auto& group : box->groups) {
      const Name name(group.given_name, group.size, group.members);
      auto& known = numbers[name];
      const Meeting meeting(group.meeting, times[{name, group.meeting}]++);
      const int number = known.emplace(meeting, static_cast<int>(known.size()) + 1).first->second;
      group.name = shm::numbered_group(group.given_name, number);
    }
  }
}

JobBoxes sorted(JobBoxes job) {
  drop_unused(job.ranks);
  name_groups(job.ranks);
  std::stable_sort(job.ranks.begin(), job.ranks.end(),
                   [](const RankBox& a, const RankBox& b) { return a.box.rank < b.box.rank; });
  return job;
}

}  // namespace

std::vector<JobBoxes> find_jobs() {
  std::map<std::string, JobBoxes> jobs;
  for (auto& [box, holders] : find_all()) {
    auto& job = jobs[box.job];
    job.job = box.job;
    auto end = state_of_process(box);
    job.ranks.push_back({std::move(box), std::move(end), {holders.begin(), holders.end()}});
  }
  std::vector<JobBoxes> all;
  for (auto& [id, job] : jobs) {
    job.taken_ns = shm::monotonic_ns();
    all.push_back(sorted(std::move(job)));
  }
  return all;
}

JobBoxes find_black_boxes(const std::string& job, pid_t pid) {
  auto found = find_all();
  std::set<std::string> jobs;
  if (pid != 0) {
    // A rank may itself be the launcher, or have ranks as threads: the job that it takes part in comes first.
    const auto add = [&](bool taken) {
      for (const auto& [box, holders] : found)
        if (holders.contains(pid) && (!taken || box.pid != 0)) jobs.insert(box.job);
    };
    add(true);
    if (jobs.empty()) add(false);
    if (jobs.empty())
      throw InvalidArgument(text("process ", pid, " has no black box"),
                            "Give the pid of a job's muster run or of one of its ranks, of the same user");
  } else {
    for (const auto& [box, holders] : found)
      if (box.job.starts_with(job)) jobs.insert(box.job);
    if (jobs.contains(job)) jobs = {job};  // also if other ids begin with it
    if (jobs.empty())
      throw InvalidArgument(
          job.empty() ? "no job of this user runs on this host" : text("no job '", job, "' runs here"),
          "See muster ps. Of a job that has ended, muster run --black-box FILE leaves a file for muster blackbox");
  }
  if (jobs.size() > 1)
    throw InvalidArgument(text("several jobs run here: ", join(jobs)), "Choose one with --job or --pid");

  JobBoxes boxes{.job = *jobs.begin()};
  for (auto& [box, holders] : found)
    if (box.job == boxes.job) {
      auto end = state_of_process(box);
      boxes.ranks.push_back({std::move(box), std::move(end), {holders.begin(), holders.end()}});
    }
  boxes.taken_ns = shm::monotonic_ns();
  return sorted(std::move(boxes));
}

JobBoxes read_black_boxes(const std::filesystem::path& path) {
  std::error_code error;
  errno = 0;
  if (const bool is_folder = std::filesystem::is_directory(path, error); is_folder || !std::ifstream(path))
    throw InvalidArgument(text("'", path.string(), "' cannot be read: ",
                               is_folder ? "it is a folder" : std::generic_category().message(errno)),
                          "Give a file that muster run --black-box wrote");
  const std::string bytes = text_of_file(path);
  try {
    if (!bytes.starts_with(kMagic)) throw CorruptError(text("it does not begin with ", kMagic));
    WireReader reader(std::string_view(bytes).substr(kMagic.size()));
    if (const auto format = reader.get<uint64_t>(); format != kFormat)
      throw CorruptError(text("it has format ", format, ", and this Muster reads format ", kFormat));
    JobBoxes boxes{.taken_ns = reader.get<uint64_t>()};
    for (auto count = reader.get<uint64_t>(); count > 0; --count) {
      std::string end(reader.get_string());
      std::replace_if(
          end.begin(), end.end(), [](unsigned char byte) { return byte < ' ' || byte == 0x7f; }, '?');
      const auto segment = reader.get_string();
      std::vector<uint64_t> words(segment.size() / sizeof(uint64_t));  // aligned
      if (!words.empty()) std::memcpy(words.data(), segment.data(), words.size() * sizeof(uint64_t));
      boxes.ranks.push_back({shm::read_black_box(std::as_bytes(std::span(words))), std::move(end), {}});
    }
    reader.expect_done();
    if (boxes.ranks.empty()) throw CorruptError("it has the black box of no rank");
    boxes.job = boxes.ranks.front().box.job;
    return sorted(std::move(boxes));
  } catch (const CorruptError& problem) {
    throw CorruptError(text("'", path.string(), "' is not a file of black boxes: ", problem.message()),
                       problem.advice());
  }
}

void write_black_boxes(const std::filesystem::path& path, const std::vector<SavedBox>& boxes) try {
  AtomicFile file(path);
  file.write(kMagic);
  file.write(WireWriter().put(kFormat).put(shm::monotonic_ns()).put(static_cast<uint64_t>(boxes.size())).take());
  for (const auto& [fd, end] : boxes) {
    const auto words = shm::copy_black_box(fd);
    const auto bytes = std::as_bytes(std::span(words));
    file.write(WireWriter().put(std::string_view(end)).put(static_cast<uint32_t>(bytes.size())).take());
    file.write({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  }
  file.commit(false);
} catch (const Unavailable& error) {
  throw Unavailable(text("the black boxes are lost: ", error.message()), error.advice());
}

ReportFile black_box_report(const std::string& file) { return {file, kMagic, "the black boxes"}; }

}  // namespace muster::launch
