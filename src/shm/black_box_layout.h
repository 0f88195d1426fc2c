// The layout of a black box: one memfd per rank, all words of 64 bits, little-endian.
//
//   | Header: who, names, groups, progress of the training, head | Record x 4096 |
//
// A record is claimed by fetch_add on `head`; ticket t lies in records[t % 4096] until ticket t + 4096 comes. Its first
// word tells the state of the other seven:
//
//   version = t << 3 | step     step 0: never written (only with t = 0)
//                               1, 3, 5: being written    2: begun    4: running    6: ended
//
// A writer takes the record by compare-and-swap of `version` from an even step to an odd one, stores the other words,
// and stores the next even step. A reader loads `version`, the words, and `version` again: equal and even means that
// the words belong together; a step is never repeated for the same ticket, so no change in between goes unnoticed. The
// words are stored with release and loaded with acquire, which orders them with `version` on both sides: a reader that
// sees a word of a later write also sees that write's odd version. A writer that dies in the middle leaves an odd
// version.
//
// A writer that finds its record taken by another writer or by a later ticket gives up its entry. So writers never
// wait; this happens only if 4096 operations begin within the few nanoseconds of a write.
//
// The progress of the training is in five words, each valid by itself: a reader may find the step of one report beside
// the samples of the next.
//
// Thread-safety: of the words, as above; `at()` and `copy_words()` make each access atomic.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace muster::shm::black_box {

inline constexpr uint64_t kMagic = 0x584f424b43414c42;  // "BLACKBOX"
inline constexpr uint64_t kFormat = 3;
inline constexpr size_t kRecords = 4096, kGroups = 64, kOperationNames = 32, kDtypeNames = 64;

inline constexpr uint64_t kStepBits = 3, kStepMask = 7;
enum Step : uint64_t { kBeginning = 1, kBegun = 2, kStarting = 3, kStarted = 4, kEnding = 5, kEnded = 6 };

struct Record {
  uint64_t version;
  uint64_t what;  // pack()
  uint64_t sequence;
  uint64_t bytes;
  uint64_t tag;
  uint64_t posted_ns, start_ns, end_ns;  // CLOCK_MONOTONIC; 0: not yet
};
static_assert(sizeof(Record) == 64);

struct What {
  uint8_t operation = 0, dtype = 0, group = 0, state = 0;
  int32_t peer = -1;
};
constexpr uint64_t pack(const What& what) {
  return uint64_t{what.operation} | uint64_t{what.dtype} << 8 | uint64_t{what.group} << 16 |
         uint64_t{what.state} << 24 | uint64_t{static_cast<uint32_t>(what.peer)} << 32;
}
constexpr What unpack(uint64_t word) {
  return {static_cast<uint8_t>(word), static_cast<uint8_t>(word >> 8), static_cast<uint8_t>(word >> 16),
          static_cast<uint8_t>(word >> 24), static_cast<int32_t>(static_cast<uint32_t>(word >> 32))};
}

struct Group {
  uint64_t ready;    // 1 once the rest is there
  uint64_t size;     // in ranks; 0: not known
  uint64_t members;  // a hash of them, to distinguish groups of the same name
  uint64_t meeting;  // a number that the ranks of the group have in common, and with no other group of that name
  char name[40];
};
static_assert(sizeof(Group) == 72);

// 0: never reported. Written by the threads that report, read by watchers.
struct Training {
  uint64_t started_ns;   // the first report; CLOCK_MONOTONIC
  uint64_t reported_ns;  // the last one
  uint64_t step_plus_1;
  uint64_t samples_plus_1;
  uint64_t reports;
};

// Strings are cut to fit and padded with zeros; one that fills its field has no zero at its end.
struct alignas(128) Header {
  uint64_t magic, format;
  uint64_t rank, world_size;
  uint64_t created_ns;     // CLOCK_MONOTONIC
  int64_t realtime_ahead;  // CLOCK_REALTIME - CLOCK_MONOTONIC, when the box was made
  uint64_t owner;          // the pid of the rank; 0: no rank has come yet
  uint64_t owner_start;    // its start time in clock ticks since boot, as in /proc/<pid>/stat
  char host[64], job[64];
  char operations[kOperationNames][24];
  char dtypes[kDtypeNames][16];
  Group groups[kGroups];
  alignas(128) uint64_t group_count;  // may exceed kGroups
  alignas(128) Training training;     // on its own cache line, so that a watcher delays no operation
  alignas(128) uint64_t head;         // the next ticket
};

struct Segment {
  Header header;
  Record records[kRecords];
};
static_assert(std::is_trivially_copyable_v<Segment> && sizeof(Segment) % sizeof(uint64_t) == 0);

// A word as an atomic. In memory that is mapped read-only it may only be loaded: an aligned load writes nothing.
template <typename Word>
std::atomic_ref<Word> at(const Word& word) {
  static_assert(sizeof(Word) == sizeof(uint64_t) && std::atomic_ref<Word>::is_always_lock_free);
  return std::atomic_ref<Word>(const_cast<Word&>(word));
}

// Copies `bytes` (a multiple of 8) word by word; one side may be shared, both are aligned.
inline void copy_words(void* to, const void* from, size_t bytes) {
  auto* target = static_cast<uint64_t*>(to);
  const auto* source = static_cast<const uint64_t*>(from);
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i)
    at(target[i]).store(at(source[i]).load(std::memory_order_relaxed), std::memory_order_relaxed);
}

// Copies the record in `shared`; false if its words do not belong together. Tests call a writer in `between`.
template <typename Between = void (*)()>
bool read_whole(
    const Record& shared, Record* record, Between between = [] {}) {
  record->version = at(shared.version).load(std::memory_order_acquire);
  for (auto word : {&Record::what, &Record::sequence, &Record::bytes, &Record::tag, &Record::posted_ns,
                    &Record::start_ns, &Record::end_ns}) {
    between();
    record->*word = at(shared.*word).load(std::memory_order_acquire);
  }
  return (record->version & 1) == 0 && at(shared.version).load(std::memory_order_relaxed) == record->version;
}

}  // namespace muster::shm::black_box
