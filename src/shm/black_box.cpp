#include "shm/black_box.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/env.h"
#include "base/process.h"
#include "base/text.h"
#include "shm/black_box_layout.h"

namespace muster::shm {

using namespace black_box;

namespace {

constexpr uint64_t kNoTicket = ~uint64_t{0};

Segment& segment_of(const Mapping& mapping) { return *reinterpret_cast<Segment*>(mapping.data()); }

template <size_t kSize>
void set(char (&field)[kSize], std::string_view value) {
  std::memset(field, 0, kSize);
  std::memcpy(field, value.data(), std::min(kSize, value.size()));
}

// Writes a string into shared memory, word by word.
template <size_t kSize>
void set_shared(char (&field)[kSize], std::string_view value) {
  alignas(uint64_t) char words[kSize];
  set(words, value);
  copy_words(field, words, kSize);
}

uint64_t hash_of(std::span<const int> ranks) {  // FNV-1a
  uint64_t hash = 0xcbf29ce484222325;
  for (const int rank : ranks) hash = (hash ^ static_cast<uint32_t>(rank)) * 0x100000001b3;
  return hash;
}

uint64_t clock_ns(clockid_t clock) {
  timespec now{};
  ::clock_gettime(clock, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

bool is_black_box(int fd) {
  struct stat info {};
  uint64_t start[2] = {};
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ::fstat(fd, &info) == 0 &&
         static_cast<size_t>(info.st_size) >= sizeof(Segment) &&
         ::pread(fd, start, sizeof start, offsetof(Header, magic)) == sizeof start && start[0] == kMagic &&
         start[1] == kFormat;
}

// An id that the processes of one job have in common. Without a launcher's variables each process is its own job.
std::string job_id(bool thread_rank) {
  if (const auto id = env_string("MUSTER_JOB_ID"); id && !thread_rank) return *id;
  for (const char* launcher : {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"})
    if (std::getenv(launcher) && !thread_rank) return text("parent-", ::getppid());
  return text("pid-", ::getpid());
}

// Makes this process the owner of the box. False if another living process is.
bool take(Header& header) {
  const auto self = static_cast<uint64_t>(::getpid());
  uint64_t owner = at(header.owner).load(std::memory_order_relaxed);
  do {
    if (owner == self) return true;
    const uint64_t started = owner == 0 ? 0 : start_time_of(static_cast<pid_t>(owner));
    const uint64_t noted = at(header.owner_start).load(std::memory_order_relaxed);
    if (started != 0 && (noted == started || noted == 0)) return false;
  } while (!at(header.owner).compare_exchange_weak(owner, self, std::memory_order_relaxed));
  at(header.owner_start).store(start_time_of(::getpid()), std::memory_order_relaxed);
  return true;
}

// Takes the record of `ticket` from an even step to `step`. False if another writer or a later ticket has it.
bool take(Record& record, uint64_t ticket, Step step) {
  uint64_t version = at(record.version).load(std::memory_order_relaxed);
  const uint64_t holder = version >> kStepBits;
  if ((version & 1) != 0 || (step == kBeginning ? holder > ticket : holder != ticket)) return false;
  return at(record.version)
      .compare_exchange_strong(version, ticket << kStepBits | step, std::memory_order_acquire,
                               std::memory_order_relaxed);
}

void set(uint64_t& word, uint64_t value) { at(word).store(value, std::memory_order_release); }

}  // namespace

uint64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

BlackBoxState state_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kTimeout:
      return BlackBoxState::kTimedOut;
    case ErrorCode::kPeerLost:
      return BlackBoxState::kPeerLost;
    case ErrorCode::kAborted:
      return BlackBoxState::kAborted;
    default:
      return BlackBoxState::kFailed;
  }
}

UniqueFd create_black_box(int rank, int world_size, std::string_view job_id) {
  UniqueFd fd = create_memfd(kBlackBoxName, sizeof(Segment));
  const auto header = std::make_unique<Header>();
  header->magic = kMagic;
  header->format = kFormat;
  header->rank = static_cast<uint64_t>(rank);
  header->world_size = static_cast<uint64_t>(world_size);
  header->created_ns = monotonic_ns();
  header->realtime_ahead = static_cast<int64_t>(clock_ns(CLOCK_REALTIME) - header->created_ns);
  char host[sizeof header->host] = {};
  ::gethostname(host, sizeof host - 1);
  set(header->host, host);
  set(header->job, job_id);
  // Only the part that is not zero: a launcher of thousands of ranks need not touch the rest.
  constexpr size_t kFilled = offsetof(Header, operations);
  if (::pwrite(fd.get(), header.get(), kFilled, 0) != static_cast<ssize_t>(kFilled))
    throw_errno("cannot make a rank's black box", "Free memory or use fewer ranks");
  return fd;
}

void renumber_black_box(int fd, int rank, int world_size) {
  const auto box = BlackBox::open(fd);
  Header& header = segment_of(*box->mapping_).header;
  set(header.rank, static_cast<uint64_t>(rank));
  set(header.world_size, static_cast<uint64_t>(world_size));
}

std::shared_ptr<BlackBox> BlackBox::open(int fd) {
  if (!is_black_box(fd))
    throw CorruptError(text("descriptor ", fd, " is not a black box, or is one of another version of Muster"));
  commit(fd, 0, sizeof(Segment));  // a shortage is an error here, and not a SIGBUS in the middle of training
  auto mapping = map_memfd(fd);
#ifdef MADV_POPULATE_WRITE
  ::madvise(mapping->data(), mapping->size(), MADV_POPULATE_WRITE);  // so that the first 4096 entries cause no faults
#endif
  return std::shared_ptr<BlackBox>(new BlackBox(std::move(mapping)));
}

std::shared_ptr<BlackBox> open_black_box(int rank, int world_size, bool thread_rank) {
  const auto given = thread_rank ? std::nullopt : env_int(kBlackBoxVariable);
  // A process may inherit the variable without the descriptor, and so may a rank of another job.
  if (given && *given >= 0 && *given <= INT32_MAX && is_black_box(static_cast<int>(*given))) {
    const auto fd = static_cast<int>(*given);
    auto box = BlackBox::open(fd);
    Header& header = segment_of(*box->mapping_).header;
    if (header.rank == static_cast<uint64_t>(rank) && header.world_size == static_cast<uint64_t>(world_size) &&
        take(header)) {
      ::fcntl(fd, F_SETFD, FD_CLOEXEC);  // processes that this one starts do not need it
      return box;
    }
  }
  UniqueFd own = create_black_box(rank, world_size, job_id(thread_rank));
  auto box = BlackBox::open(own.get());
  take(segment_of(*box->mapping_).header);
  box->own_ = std::move(own);
  return box;
}

void BlackBox::set_names(std::span<const std::string_view> operations, std::span<const std::string_view> dtypes) {
  Header& header = segment_of(*mapping_).header;
  for (size_t i = 0; i < std::min(kOperationNames, operations.size()); ++i)
    set_shared(header.operations[i], operations[i]);
  for (size_t i = 0; i < std::min(kDtypeNames, dtypes.size()); ++i) set_shared(header.dtypes[i], dtypes[i]);
}

int BlackBox::group(std::string_view name, std::span<const int> ranks, uint64_t meeting) {
  Header& header = segment_of(*mapping_).header;
  Group mine{.ready = 1, .size = ranks.size(), .members = hash_of(ranks), .meeting = meeting};
  set(mine.name, name);
  if (at(header.group_count).load(std::memory_order_relaxed) < kGroups) {
    const uint64_t index = at(header.group_count).fetch_add(1, std::memory_order_relaxed);
    if (index < kGroups) {
      Group& entry = header.groups[index];
      copy_words(&entry.size, &mine.size, sizeof mine - offsetof(Group, size));
      at(entry.ready).store(1, std::memory_order_release);
      return static_cast<int>(index);
    }
  }
  for (size_t index = kGroups; index-- > 0;) {
    Group entry;
    if (at(header.groups[index].ready).load(std::memory_order_acquire) != 1) continue;
    copy_words(&entry, &header.groups[index], sizeof entry);
    entry.meeting = mine.meeting;
    if (std::memcmp(&entry, &mine, sizeof entry) == 0) return static_cast<int>(index);
  }
  return kMoreGroups;
}

uint64_t BlackBox::begin(const BlackBoxEntry& entry, uint64_t now) noexcept {
  if (now == 0) now = monotonic_ns();
  return write(entry, now, entry.state == BlackBoxState::kPosted ? 0 : now, 0);
}

uint64_t BlackBox::write(const BlackBoxEntry& entry, uint64_t posted, uint64_t began, uint64_t ended) noexcept {
  Segment& segment = segment_of(*mapping_);
  const uint64_t ticket = at(segment.header.head).fetch_add(1, std::memory_order_relaxed);
  Record& record = segment.records[ticket % kRecords];
  __builtin_prefetch(&segment.records[(ticket + 1) % kRecords], 1);
  if (!take(record, ticket, kBeginning)) return kNoTicket;
  set(record.what, pack({entry.operation, entry.dtype, static_cast<uint8_t>(entry.group),
                         static_cast<uint8_t>(entry.state), entry.peer}));
  set(record.sequence, entry.sequence);
  set(record.bytes, entry.bytes);
  set(record.tag, entry.tag);
  set(record.posted_ns, posted);
  set(record.start_ns, began);
  set(record.end_ns, ended);
  set(record.version, ticket << kStepBits | (ended == 0 ? kBegun : kEnded));
  return ticket;
}

void BlackBox::start(uint64_t ticket, uint64_t sequence) noexcept {
  Record& record = segment_of(*mapping_).records[ticket % kRecords];
  if (ticket == kNoTicket || !take(record, ticket, kStarting)) return;
  What what = unpack(at(record.what).load(std::memory_order_relaxed));
  what.state = static_cast<uint8_t>(BlackBoxState::kRunning);
  set(record.what, pack(what));
  if (sequence != kNoSequence) set(record.sequence, sequence);
  set(record.start_ns, monotonic_ns());
  set(record.version, ticket << kStepBits | kStarted);
}

void BlackBox::end(uint64_t ticket, BlackBoxState state, uint64_t now) noexcept {
  Record& record = segment_of(*mapping_).records[ticket % kRecords];
  if (ticket == kNoTicket || !take(record, ticket, kEnding)) return;
  What what = unpack(at(record.what).load(std::memory_order_relaxed));
  what.state = static_cast<uint8_t>(state);
  set(record.what, pack(what));
  set(record.end_ns, now != 0 ? now : monotonic_ns());
  set(record.version, ticket << kStepBits | kEnded);
}

void BlackBox::report(std::optional<uint64_t> step, std::optional<uint64_t> samples) noexcept {
  Training& training = segment_of(*mapping_).header.training;
  const uint64_t now = monotonic_ns();
  uint64_t never = 0;
  if (at(training.started_ns).load(std::memory_order_relaxed) == 0)
    at(training.started_ns).compare_exchange_strong(never, now, std::memory_order_relaxed);
  if (step) set(training.step_plus_1, *step + 1);
  if (samples) set(training.samples_plus_1, *samples + 1);
  at(training.reports).fetch_add(1, std::memory_order_relaxed);
  set(training.reported_ns, now);
}

}  // namespace muster::shm
