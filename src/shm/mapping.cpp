#include "shm/mapping.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/cgroups.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::shm {
namespace {

constexpr int kSizeSeals = F_SEAL_SHRINK | F_SEAL_GROW;

struct MappingCache {
  std::mutex mutex;
  std::map<std::pair<dev_t, ino_t>, std::weak_ptr<Mapping>> mappings;
};

MappingCache& mapping_cache() {
  // Leaked on purpose: tensors may outlive every static object.
  static auto* const cache = std::make_unique<MappingCache>().release();
  return *cache;
}

size_t meminfo(const std::filesystem::path& root, const char* field) {
  std::ifstream in(root / "proc/meminfo");
  std::string name;
  for (size_t kib = 0; in >> name >> kib; in.ignore(64, '\n'))
    if (name == field) return kib << 10;
  throw Unavailable(text("/proc/meminfo has no ", field), "Mount /proc");
}

// What a control group's processes may still take. The kernel gives up the cache of files for it, which counts as used.
// No limit: the largest number.
size_t left_in(const std::filesystem::path& cgroup, const char* limit_file, const char* used_file,
               const std::set<std::string>& reclaimable) {
  size_t limit = 0, used = 0;
  if (!(std::ifstream(cgroup / limit_file) >> limit) || !(std::ifstream(cgroup / used_file) >> used))
    return SIZE_MAX;  // "max" is not a number
  std::ifstream in(cgroup / "memory.stat");
  std::string name;
  for (size_t bytes = 0; in >> name >> bytes;)
    if (reclaimable.contains(name)) used -= std::min(used, bytes);
  return limit - std::min(limit, used);
}

}  // namespace

size_t page_size() {
  static const auto size = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

size_t memory_total() { return meminfo("/", "MemTotal:"); }
size_t memory_available(const std::filesystem::path& root) {
  size_t least = meminfo(root, "MemAvailable:");
  auto folders = own_cgroups(root);
  folders.push_back(root / "sys/fs/cgroup");  // where a container sees its own, whatever /proc/self/cgroup says
  for (const auto& folder : folders)
    least = std::min(
        least, left_in(folder, "memory.max", "memory.current", {"inactive_file", "active_file", "slab_reclaimable"}));
  for (const auto& folder : own_memory_cgroups_v1(root))
    least = std::min(least, left_in(folder, "memory.limit_in_bytes", "memory.usage_in_bytes",
                                    {"total_inactive_file", "total_active_file"}));
  return least;
}

UniqueFd create_memfd(const char* name, size_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw_errno("memfd_create", "Muster needs a Linux kernel of 3.17 or later");
  if (::ftruncate(fd.get(), static_cast<off_t>(round_up(bytes, page_size()))) != 0)
    throw_errno(text("making a shared-memory segment of ", bytes, " bytes"));
  if (::fcntl(fd.get(), F_ADD_SEALS, kSizeSeals | F_SEAL_SEAL) != 0) throw_errno("sealing a shared-memory segment");
  return fd;
}

Mapping::~Mapping() { ::munmap(data_, size_); }

std::shared_ptr<Mapping> map_memfd(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw_errno("fstat of a shared-memory segment");
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSizeSeals) != kSizeSeals)
    throw CorruptError("a shared-memory segment from a peer is not sealed");

  auto& cache = mapping_cache();
  const std::lock_guard lock(cache.mutex);
  auto& entry = cache.mappings[{info.st_dev, info.st_ino}];
  if (auto mapping = entry.lock()) return mapping;
  const auto size = static_cast<size_t>(info.st_size);
  void* const data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (data == MAP_FAILED)
    throw_errno(text("mapping ", size, " bytes of shared memory"),
                "Raise the limit on address space (ulimit -v) or set WorldOptions::heap_capacity");
  auto mapping = std::make_shared<Mapping>(static_cast<std::byte*>(data), size);
  entry = mapping;
  std::erase_if(cache.mappings, [](const auto& item) { return item.second.expired(); });
  return mapping;
}

void commit(int fd, size_t offset, size_t bytes) {
  if (bytes == 0) return;
  // fallocate() on a memfd takes pages until the OOM killer acts, so check first.
  if (bytes > (8u << 20) && bytes > memory_available())
    throw Unavailable(
        text("shared memory: ", bytes, " bytes are needed, but only ", memory_available(), " are available"),
        "Use fewer ranks or smaller tensors on the heap");
  while (::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR)
      throw_errno(text("taking ", bytes, " bytes of shared memory"), "Free memory or use fewer ranks");
}

void discard(int fd, size_t offset, size_t bytes) {
  if (bytes == 0) return;
  while (::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(bytes)) != 0)
    if (errno != EINTR) throw_errno(text("freeing ", bytes, " bytes of shared memory"));
}

void allow(std::byte* data, size_t bytes) {
  if (::mprotect(data, bytes, PROT_READ | PROT_WRITE) != 0) throw_errno("mprotect of shared memory");
}
void forbid(std::byte* data, size_t bytes) {
  if (::mprotect(data, bytes, PROT_NONE) != 0) throw_errno("mprotect of shared memory");
}

size_t committed(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) throw_errno("fstat of a shared-memory segment");
  return static_cast<size_t>(info.st_blocks) * 512;  // stat(2)
}

}  // namespace muster::shm
