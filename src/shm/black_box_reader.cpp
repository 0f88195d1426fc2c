#include "shm/black_box_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <tuple>

#include "base/text.h"
#include "shm/black_box_layout.h"

namespace muster::shm {

using namespace black_box;

namespace {

template <size_t kSize>
std::string string_of(const char (&field)[kSize]) {
  std::string string(field, std::find(field, field + kSize, '\0'));
  for (char& byte : string)
    if (static_cast<unsigned char>(byte) < ' ' || byte == 0x7f) byte = '?';
  return string;
}

template <typename Names>
std::string name_of(const Names& names, size_t code, const char* kind) {
  std::string name = code < std::size(names) ? string_of(names[code]) : std::string();
  return name.empty() ? text(kind, ' ', code) : name;
}

bool makes_sense(const Record& record, const What& what, const BlackBoxOperation& operation, size_t index) {
  const uint64_t step = record.version & kStepMask;
  const bool posted = operation.state == BlackBoxState::kPosted;
  return operation.ticket % kRecords == index && step >= kBegun &&
         what.state >= static_cast<uint8_t>(BlackBoxState::kPosted) &&
         what.state <= static_cast<uint8_t>(BlackBoxState::kAborted) &&
         operation.under_way() == (operation.end_ns == 0) && (step == kEnded) == (operation.end_ns != 0) &&
         operation.posted_ns != 0 && (operation.start_ns == 0 || operation.start_ns >= operation.posted_ns) &&
         (!posted || operation.start_ns == 0) &&
         (operation.state != BlackBoxState::kRunning || operation.start_ns != 0) &&
         (operation.end_ns == 0 || operation.end_ns >= operation.since_ns());
}

void read_groups(const Header& header, BlackBoxSnapshot* box, std::vector<int>* index_of) {
  std::map<std::tuple<std::string, uint64_t, uint64_t>, int> count;
  index_of->assign(kGroups, -1);
  for (size_t i = 0; i < std::min<uint64_t>(kGroups, header.group_count); ++i) {
    const Group& group = header.groups[i];
    if (group.ready != 1) continue;
    const std::string name = string_of(group.name);
    const int times = ++count[{name, group.size, group.members}];
    (*index_of)[i] = static_cast<int>(box->groups.size());
    box->groups.push_back({numbered_group(name, times), group.size, group.members, group.meeting, name});
  }
}

BlackBoxTraining read_training(const Header& shared) {
  Training words;
  copy_words(&words, &shared.training, sizeof words);
  BlackBoxTraining training{.started_ns = words.started_ns, .reported_ns = words.reported_ns, .reports = words.reports};
  if (words.step_plus_1 != 0) training.step = words.step_plus_1 - 1;
  if (words.samples_plus_1 != 0) training.samples = words.samples_plus_1 - 1;
  return training;
}

struct ReadOnly {
  void* data = MAP_FAILED;
  size_t size = 0;
  explicit ReadOnly(int fd) {
    struct stat info {};
    const int seals = ::fcntl(fd, F_GET_SEALS);
    // It must be sealed, or it could shrink while it is read.
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &info) != 0 ||
        static_cast<size_t>(info.st_size) < sizeof(Segment))
      throw CorruptError("a descriptor is not a black box");
    size = static_cast<size_t>(info.st_size);
    data = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) throw_errno("mapping a black box");
  }
  ReadOnly(const ReadOnly&) = delete;
  ReadOnly& operator=(const ReadOnly&) = delete;
  ~ReadOnly() { ::munmap(data, size); }
};

}  // namespace

BlackBoxSnapshot read_black_box(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(Segment)) throw CorruptError(text("a black box of ", bytes.size(), " bytes is too short"));
  const auto& segment = *reinterpret_cast<const Segment*>(bytes.data());
  const auto header = std::make_unique<Header>();
  copy_words(header.get(), &segment.header, sizeof(Header));
  constexpr uint64_t kMost = std::numeric_limits<int>::max();
  if (header->magic != kMagic) throw CorruptError("a black box does not begin with its magic number");
  if (header->format != kFormat)
    throw CorruptError(text("a black box has format ", header->format, ", and this Muster reads format ", kFormat),
                       "Use the muster command of the version that made it");
  if (header->world_size > kMost || header->rank >= header->world_size || header->owner > kMost)
    throw CorruptError("a black box names an impossible rank");

  BlackBoxSnapshot box;
  box.rank = static_cast<int>(header->rank);
  box.world_size = static_cast<int>(header->world_size);
  box.pid = static_cast<pid_t>(header->owner);
  box.pid_start = header->owner_start;
  box.host = string_of(header->host);
  box.job = string_of(header->job);
  box.created_ns = header->created_ns;
  box.realtime_ahead = header->realtime_ahead;
  box.training = read_training(segment.header);

  for (size_t index = 0; index < kRecords; ++index) {
    Record record;
    // A running rank may be writing the record just now; the second look finds it complete.
    if (!read_whole(segment.records[index], &record) && !read_whole(segment.records[index], &record)) {
      ++box.unreadable;
      continue;
    }
    if (record.version == 0) continue;
    const What what = unpack(record.what);
    BlackBoxOperation operation{
        .ticket = record.version >> kStepBits,
        .group = what.group,  // its number in the box, until the groups are read
        .name = name_of(header->operations, what.operation, "operation"),
        .dtype = what.dtype < kDtypeNames ? string_of(header->dtypes[what.dtype]) : std::string(),
        .sequence = record.sequence,
        .bytes = record.bytes,
        .tag = record.tag,
        .peer = what.peer,
        .posted_ns = record.posted_ns,
        .start_ns = record.start_ns,
        .end_ns = record.end_ns,
        .state = static_cast<BlackBoxState>(what.state),
    };
    if (makes_sense(record, what, operation, index)) {
      box.operations.push_back(std::move(operation));
    } else {
      ++box.unreadable;
    }
  }
  // Read these after the records, so that no record belongs to a group that is missing here, or is newer than the head.
  box.begun = at(segment.header.head).load(std::memory_order_acquire);
  for (size_t i = 0; i < kGroups; ++i)
    if (at(segment.header.groups[i].ready).load(std::memory_order_acquire) == 1)
      copy_words(&header->groups[i], &segment.header.groups[i], sizeof(Group));
  header->group_count = at(segment.header.group_count).load(std::memory_order_relaxed);
  std::vector<int> index_of;
  read_groups(*header, &box, &index_of);
  for (auto& operation : box.operations)
    operation.group = operation.group < static_cast<int>(kGroups) ? index_of[static_cast<size_t>(operation.group)] : -1;
  box.unreadable += static_cast<size_t>(
      std::erase_if(box.operations, [&](const auto& operation) { return operation.ticket >= box.begun; }));
  std::sort(box.operations.begin(), box.operations.end(),
            [](const auto& a, const auto& b) { return a.ticket < b.ticket; });
  return box;
}

BlackBoxSnapshot read_black_box(int fd) {
  const ReadOnly mapping(fd);
  return read_black_box({static_cast<const std::byte*>(mapping.data), mapping.size});
}

std::vector<uint64_t> copy_black_box(int fd) {
  const ReadOnly mapping(fd);
  std::vector<uint64_t> words(sizeof(Segment) / sizeof(uint64_t));
  copy_words(words.data(), mapping.data, sizeof(Segment));
  return words;
}

std::string numbered_group(const std::string& name, int number) {
  return number > 1 ? text(name, " (", number, ')') : name;
}

std::string_view to_string(BlackBoxState state) {
  static constexpr std::string_view kNames[] = {"?",      "posted",    "running",   "done",
                                                "failed", "timed out", "peer lost", "aborted"};
  const auto index = static_cast<size_t>(state);
  return index < std::size(kNames) ? kNames[index] : kNames[0];
}

}  // namespace muster::shm
