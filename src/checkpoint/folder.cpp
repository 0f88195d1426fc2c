#include "checkpoint/folder.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/atomic_file.h"
#include "base/log.h"
#include "base/random.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/deadline.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kEnding = ".snapshot.safetensors";
constexpr std::chrono::seconds kDying{2};  // how long a process that was killed may still hold the lock

// A file name, parsed.
struct Name {
  int64_t steps = 0;
  int rank = -1;  // of a shard
  bool temporary = false;
};

bool skip(std::string_view& rest, std::string_view word) {
  if (!rest.starts_with(word)) return false;
  rest.remove_prefix(word.size());
  return true;
}

template <typename Number>
bool number(std::string_view& rest, Number& value) {
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), value);
  // Accepts only what we write ourselves: "step-007" is another program's file.
  if (error != std::errc() || value < 0 || (rest[0] == '0' && end != rest.data() + 1) || rest[0] == '-') return false;
  rest.remove_prefix(static_cast<size_t>(end - rest.data()));
  return true;
}

std::string_view mark(std::string_view& rest) {
  const auto length = std::min(rest.find_first_not_of("0123456789abcdef"), rest.size());
  const auto found = rest.substr(0, length);
  rest.remove_prefix(length);
  return found;
}

std::optional<Name> parse(std::string_view rest) {
  Name name;
  int world_size = 0;
  if (!skip(rest, "step-") || !number(rest, name.steps)) return std::nullopt;
  if (skip(rest, ".shard-")) {
    if (!number(rest, name.rank) || !skip(rest, "-of-") || !number(rest, world_size)) return std::nullopt;
    if (!skip(rest, ".") || mark(rest).empty()) return std::nullopt;
  }
  if (!skip(rest, kEnding)) return std::nullopt;
  if (skip(rest, ".")) {
    name.temporary = true;
    if (mark(rest).empty() || !skip(rest, kTemporaryEnding)) return std::nullopt;
  }
  if (!rest.empty()) return std::nullopt;
  return name;
}

// The files in the folder whose names are ours.
std::vector<std::pair<std::string, Name>> list(const fs::path& path, std::error_code& error) {
  std::vector<std::pair<std::string, Name>> names;
  fs::directory_iterator entry(path, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    std::string file = entry->path().filename().string();
    if (const auto name = parse(file)) names.emplace_back(std::move(file), *name);
  }
  return names;
}

std::vector<fs::path> files_where(const fs::path& path,
                                  const std::function<bool(const std::string&, const Name&)>& wanted) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& [file, name] : list(path, error))
    if (wanted(file, name)) files.push_back(path / file);
  return files;
}

// Where the link of a shard leads; none if it is not a link, or is one that we would not make.
std::optional<fs::path> target_of(const fs::path& shard) {
  std::error_code error;
  if (!fs::is_symlink(fs::symlink_status(shard, error))) return std::nullopt;
  fs::path target = fs::read_symlink(shard, error);
  if (error || target.filename() != shard.filename() || !target.is_absolute()) return std::nullopt;
  return target;
}

void remove_all(const std::vector<fs::path>& files) noexcept {
  std::error_code ignored;
  for (const auto& file : files) fs::remove(file, ignored);
}

// What flock(2) is called on. NFS has locks of files that are open for writing only; a folder's would be this host's.
UniqueFd open_for_lock(const fs::path& folder) {
  struct statfs about {};
  if (::statfs(folder.c_str(), &about) == 0 && about.f_type == NFS_SUPER_MAGIC)
    return UniqueFd(::open((folder / ".lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  return UniqueFd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

}  // namespace

Folder::Folder(fs::path path) : path_(std::move(path)) {
  std::error_code error;
  fs::create_directories(path_, error);
  if (error || !fs::is_directory(path_, error))
    throw_errno(error ? error.value() : ENOTDIR, text("cannot make the folder ", path_.string()),
                "Name one that this process may write to");
}

struct Folder::Lock {
  UniqueFd fd;
  bool is_exclusive = false;
};

void Folder::claim(Use use) {
  const auto suffices = [&](const std::shared_ptr<Lock>& lock) {
    return lock && (lock->is_exclusive || use == Use::kReads);
  };
  if (suffices(lock_)) return;
  // The process's locks, by folder. Folders of one process share a lock: flock(2) would make one of them wait for the
  // other.
  static std::mutex mutex;
  static std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Lock>> held;
  const std::lock_guard guard(mutex);
  auto lock = std::make_shared<Lock>(open_for_lock(path_));
  const auto warn = [&](int error) {
    if (!std::exchange(has_warned_, true)) {
      MUSTER_LOG(kWarning) << "no lock protects the snapshots in " << path_.string()
                           << " from another job: " << std::generic_category().message(error);
    }
  };
  struct stat about {};
  if (!lock->fd || ::fstat(lock->fd.get(), &about) != 0) return warn(errno);
  auto& ours = held[{about.st_dev, about.st_ino}];
  if (auto before = ours.lock()) lock = std::move(before);
  if (suffices(lock_ = ours.lock())) return;
  const int kind = use == Use::kReads ? LOCK_SH : LOCK_EX;
  for (const auto patience = Deadline::after(kDying); ::flock(lock->fd.get(), kind | LOCK_NB) != 0;) {
    if (errno == EINTR) continue;
    if (errno != EWOULDBLOCK) return warn(errno);
    if (patience.passed())
      throw Unavailable(text("another job has its snapshots in ", path_.string(), " now"),
                        "Name another folder, or end that job first");
    ::poll(nullptr, 0, 10);
  }
  lock->is_exclusive = use == Use::kSaves;
  ours = lock_ = lock;
}

fs::path Folder::snapshot(int64_t steps) const { return path_ / text("step-", steps, kEnding); }

fs::path Folder::shard(int64_t steps, int rank, int world_size, const std::string& mark) const {
  return path_ / text("step-", steps, ".shard-", rank, "-of-", world_size, ".", mark, kEnding);
}

fs::path Folder::link_shard(const fs::path& shard, const fs::path& other) {
  std::error_code error;
  fs::create_directories(other, error);
  if (!error && fs::equivalent(other, shard.parent_path(), error)) return shard;
  const fs::path target = fs::absolute(other) / shard.filename();
  if (!error) fs::create_symlink(target, shard, error);
  if (error)
    throw_errno(error.value(), text("cannot make the link ", shard.string(), " to ", target.string()),
                "Name folders in .shard_folders that this process may write to");
  return target;
}

std::vector<int64_t> Folder::snapshots() const {
  std::vector<int64_t> steps;
  std::error_code error;
  for (const auto& [file, name] : list(path_, error))
    if (name.rank < 0 && !name.temporary) steps.push_back(name.steps);
  if (error) throw_errno(error.value(), text("cannot read the folder ", path_.string()));
  std::sort(steps.begin(), steps.end(), std::greater<>());
  return steps;
}

int64_t Folder::newest_shard() const {
  int64_t newest = 0;
  std::error_code error;
  for (const auto& [file, name] : list(path_, error))
    if (name.rank >= 0 && !name.temporary) newest = std::max(newest, name.steps);
  return newest;
}

void Folder::remove_snapshot(int64_t steps) const noexcept {
  std::error_code error;
  fs::remove(snapshot(steps), error);
}

fs::path Folder::set_aside(int64_t steps) const {
  const fs::path aside = text(snapshot(steps).string(), ".", random_hex(4), kTemporaryEnding);
  fs::rename(snapshot(steps), aside);
  return aside;
}

std::vector<fs::path> Folder::old_shards(int rank, int world_size, const std::set<std::string>& keep,
                                         const std::set<int64_t>& keep_steps) const {
  const auto shards = files_where(path_, [&](const std::string& file, const Name& name) {
    const bool ours = rank == kAnyRank || name.rank == rank || (rank == 0 && name.rank >= world_size);
    return ours && name.rank >= 0 && !name.temporary && !keep.contains(file) && !keep_steps.contains(name.steps);
  });
  std::vector<fs::path> files;
  for (const fs::path& shard : shards) {
    if (auto target = target_of(shard)) files.push_back(std::move(*target));
    files.push_back(shard);
  }
  return files;
}

void Folder::remove_temporaries(int rank, int world_size) const noexcept {
  try {
    std::map<fs::path, std::set<std::string>> linked;  // names of shards, by the folder to which their links lead
    remove_all(files_where(path_, [&](const std::string& file, const Name& name) {
      const bool ours =
          rank == kAnyRank || name.rank == rank || (rank == 0 && (name.rank < 0 || name.rank >= world_size));
      if (!ours || is_being_written(path_ / file)) return false;
      if (const auto target = target_of(path_ / file)) linked[target->parent_path()].insert(file);
      return name.temporary;
    }));
    for (const auto& [other, shards] : linked)
      remove_all(files_where(other, [&, &other = other, &shards = shards](const std::string& file, const Name& name) {
        const std::string shard = file.substr(0, file.find(kEnding) + kEnding.size());
        return name.temporary && shards.contains(shard) && !is_being_written(other / file);
      }));
  } catch (...) {  // no memory
  }
}

void Remover::remove(std::vector<fs::path> files) noexcept {
  if (files.empty()) return;
  const std::lock_guard lock(mutex_);
  if (thread_.joinable()) thread_.join();
  try {
    thread_ = start_thread("muster-remove", [files] { remove_all(files); });
  } catch (const std::exception&) {
    remove_all(files);
  }
}

void Remover::wait() noexcept {
  const std::lock_guard lock(mutex_);
  if (thread_.joinable()) thread_.join();
}

}  // namespace muster::checkpoint
