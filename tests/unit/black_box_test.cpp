// The black box: what a rank writes is what a reader finds, whatever happened to the rank; and what it costs.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "base/process.h"
#include "base/text.h"
#include "shm/black_box.h"
#include "shm/black_box_layout.h"
#include "shm/black_box_reader.h"
#include "support/sanitized.h"

namespace muster::shm {
namespace {

using black_box::Header;
using black_box::kRecords;
using black_box::Segment;
using State = BlackBoxState;

constexpr std::string_view kOperations[] = {"nothing", "all_reduce", "barrier", "send"};
constexpr std::string_view kDtypes[] = {"Byte", "Float"};

struct Box {
  UniqueFd fd = create_black_box(1, 2, "a job");
  std::shared_ptr<BlackBox> box = BlackBox::open(fd.get());
  BlackBoxSnapshot read() const { return read_black_box(box->segment()); }
  Segment& segment() const { return *const_cast<Segment*>(reinterpret_cast<const Segment*>(box->segment().data())); }
};

// Sets the variable by which the launcher tells a rank its box.
class Variable {
 public:
  explicit Variable(const std::string& value) { ::setenv(kBlackBoxVariable, value.c_str(), 1); }
  ~Variable() { ::unsetenv(kBlackBoxVariable); }
};

TEST(BlackBox, KeepsHowFarTheTrainingIs) {
  const Box box;
  EXPECT_EQ(box.read().training.reports, 0u);
  EXPECT_EQ(box.read().training.step, std::nullopt);
  const uint64_t before = monotonic_ns();
  box.box->report(0, 64);
  auto training = box.read().training;
  EXPECT_EQ(training.step, 0u) << "step 0 is a step";
  EXPECT_EQ(training.samples, 64u);
  EXPECT_GE(training.started_ns, before);
  EXPECT_GE(training.reported_ns, training.started_ns);
  const uint64_t started = training.started_ns;
  box.box->report(std::nullopt, 128);
  box.box->report(7, std::nullopt);
  training = box.read().training;
  EXPECT_EQ(training.step, 7u);
  EXPECT_EQ(training.samples, 128u);
  EXPECT_EQ(training.started_ns, started);
  EXPECT_EQ(training.reports, 3u);
}

TEST(BlackBox, KeepsWhatWasWritten) {
  const Box box;
  box.box->set_names(kOperations, kDtypes);
  const int members[] = {0, 1};
  const int world = box.box->group("world", members);
  const uint64_t before = monotonic_ns();
  const auto first = box.box->begin({.group = world, .operation = 1, .dtype = 1, .bytes = 4096, .sequence = 12});
  box.box->end(first, State::kDone);
  const auto second =
      box.box->begin({.group = world, .operation = 3, .bytes = 8, .peer = 1, .tag = 77, .state = State::kPosted});
  const auto third = box.box->begin({.group = world, .operation = 2, .state = State::kPosted});
  box.box->start(third, 13);

  const auto read = box.read();
  EXPECT_EQ(read.rank, 1);
  EXPECT_EQ(read.world_size, 2);
  EXPECT_EQ(read.pid, 0) << "nobody has taken it";
  EXPECT_EQ(read.job, "a job");
  EXPECT_FALSE(read.host.empty());
  EXPECT_EQ(read.begun, 3u);
  EXPECT_EQ(read.unreadable, 0u);
  ASSERT_EQ(read.groups.size(), 1u);
  EXPECT_EQ(read.groups[0].name, "world");
  EXPECT_EQ(read.groups[0].size, 2u);
  ASSERT_EQ(read.operations.size(), 3u);
  const auto &done = read.operations[0], &posted = read.operations[1], &running = read.operations[2];
  EXPECT_EQ(done.name, "all_reduce");
  EXPECT_EQ(done.dtype, "Float");
  EXPECT_EQ(done.bytes, 4096u);
  EXPECT_EQ(done.sequence, 12u);
  EXPECT_EQ(done.state, State::kDone);
  EXPECT_EQ(done.peer, -1);
  EXPECT_LE(before, done.start_ns);
  EXPECT_LE(done.start_ns, done.end_ns);
  EXPECT_LE(done.end_ns, monotonic_ns());
  EXPECT_EQ(posted.name, "send");
  EXPECT_EQ(posted.state, State::kPosted);
  EXPECT_EQ(posted.peer, 1);
  EXPECT_EQ(posted.tag, 77u);
  EXPECT_EQ(posted.start_ns, 0u);
  EXPECT_FALSE(posted.is_collective());
  EXPECT_EQ(running.state, State::kRunning);
  EXPECT_EQ(running.sequence, 13u);
  EXPECT_GE(running.start_ns, running.posted_ns);
  EXPECT_EQ(running.end_ns, 0u);
  box.box->end(second, State::kPeerLost);
  EXPECT_EQ(box.read().operations[1].state, State::kPeerLost);
}

TEST(BlackBox, KeepsTheLastOperationsWhenTheRingWraps) {
  const Box box;
  const int group = box.box->group("world");
  constexpr uint64_t kCount = 3 * kRecords + 17;
  uint64_t old = 0;
  for (uint64_t i = 0; i < kCount; ++i) {
    const auto ticket = box.box->begin({.group = group, .bytes = i, .sequence = i});
    if (i == kRecords) old = ticket;
    if (i != kRecords) box.box->end(ticket, State::kDone);
  }
  box.box->end(old, State::kFailed);  // overwritten long ago: must not touch its successor
  const auto read = box.read();
  EXPECT_EQ(read.begun, kCount);
  EXPECT_EQ(read.unreadable, 0u);
  ASSERT_EQ(read.operations.size(), kRecords);
  for (size_t i = 0; i < kRecords; ++i) {
    ASSERT_EQ(read.operations[i].sequence, kCount - kRecords + i);
    ASSERT_EQ(read.operations[i].bytes, read.operations[i].sequence);
    ASSERT_EQ(read.operations[i].state, State::kDone);
  }
}

TEST(BlackBox, GroupsOfOneNameAreToldApart) {
  const Box box;
  const int evens[] = {0, 2}, odds[] = {1, 3};
  EXPECT_EQ(box.box->group("tp", evens), 0);
  EXPECT_EQ(box.box->group("tp", odds), 1);
  EXPECT_EQ(box.box->group("tp", evens), 2);
  const std::string long_name(100, 'n');
  EXPECT_EQ(box.box->group(long_name), 3);
  box.box->begin({.group = 2});
  const auto read = box.read();
  ASSERT_EQ(read.groups.size(), 4u);
  EXPECT_EQ(read.groups[0].name, "tp");
  EXPECT_EQ(read.groups[1].name, "tp");
  EXPECT_NE(read.groups[0].members, read.groups[1].members);
  EXPECT_EQ(read.groups[2].name, "tp (2)");
  EXPECT_EQ(read.groups[2].members, read.groups[0].members);
  EXPECT_EQ(read.groups[3].name, std::string(40, 'n'));
  EXPECT_EQ(read.operations.at(0).group, 2);
}

TEST(BlackBox, MoreGroupsThanItHoldsShareAPlace) {
  const Box box;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(box.box->group(text("group ", i)), i);
  EXPECT_EQ(box.box->group("group 5"), 5);
  EXPECT_EQ(box.box->group("another"), kMoreGroups);
  box.box->end(box.box->begin({.group = kMoreGroups}), State::kDone);
  EXPECT_EQ(box.read().groups.size(), 64u);
  EXPECT_EQ(box.read().operations.at(0).group, -1);
}

TEST(BlackBox, ConcurrentWritersLoseNothing) {
  const Box box;
  constexpr int kThreads = 4;
  constexpr uint64_t kEach = kRecords / kThreads;
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      const int group = box.box->group(text("group ", thread));
      for (uint64_t i = 0; i < kEach; ++i)
        box.box->end(box.box->begin({.group = group, .bytes = thread * kEach + i, .sequence = i}), State::kDone);
    });
  for (auto& thread : threads) thread.join();
  const auto read = box.read();
  ASSERT_EQ(read.operations.size(), kRecords);
  std::set<uint64_t> seen;
  std::map<int, uint64_t> next;
  for (const auto& operation : read.operations) {
    EXPECT_TRUE(seen.insert(operation.bytes).second);
    ASSERT_GE(operation.group, 0);
    EXPECT_EQ(operation.sequence, next[operation.group]++);  // by ticket, so each writer's own order is kept
    EXPECT_EQ(read.groups[static_cast<size_t>(operation.group)].name, text("group ", operation.bytes / kEach));
    EXPECT_EQ(operation.state, State::kDone);
  }
}

TEST(BlackBox, AReaderNoticesAWriterInEveryGap) {
  const auto lap = [](const Box& box) {
    for (size_t i = 0; i < kRecords; ++i) box.box->end(box.box->begin({}), State::kDone);
  };
  for (int gap = 0; gap < 7; ++gap) {
    for (const char* event : {"nothing", "start", "end", "lap", "under way"}) {
      const Box box;
      const auto ticket = box.box->begin({.state = State::kPosted});
      auto& record = box.segment().records[0];
      if (std::string_view(event) == "under way") record.version |= 1;
      int at = 0;
      black_box::Record read;
      const bool whole = black_box::read_whole(record, &read, [&] {
        if (at++ != gap) return;
        if (std::string_view(event) == "start") box.box->start(ticket);
        if (std::string_view(event) == "end") box.box->end(ticket, State::kDone);
        if (std::string_view(event) == "lap") lap(box);
      });
      EXPECT_EQ(whole, std::string_view(event) == "nothing") << event << " in gap " << gap;
    }
  }
}

// Writers keep the words of an entry in a relation that no mixture of two entries has.
TEST(BlackBox, AReaderNeverSeesHalfAnEntry) {
  const Box box;
  const int group = box.box->group("world");
  std::atomic<bool> stop{false};
  std::vector<std::thread> writers;
  for (uint64_t writer = 0; writer < 2; ++writer)
    writers.emplace_back([&, writer] {
      for (uint64_t i = writer; !stop.load(std::memory_order_relaxed); i += 2) {
        const auto ticket = box.box->begin({.group = group,
                                            .operation = static_cast<uint8_t>(i),
                                            .bytes = i,
                                            .sequence = i * 3,
                                            .peer = static_cast<int>(i & 0xffff),
                                            .tag = ~i,
                                            .state = State::kPosted});
        box.box->start(ticket, i * 5);
        box.box->end(ticket, State::kDone);
      }
    });
  size_t looked = 0;
  uint64_t begun = 0;
  // Until the ring has been overwritten many times while it is read.
  while (begun < 100 * kRecords) {
    const auto read = box.read();
    begun = read.begun;
    for (const auto& operation : read.operations) {
      ++looked;
      ASSERT_EQ(operation.tag, ~operation.bytes);
      ASSERT_EQ(operation.peer, static_cast<int>(operation.bytes & 0xffff));
      ASSERT_EQ(operation.sequence, operation.bytes * (operation.state == State::kPosted ? 3 : 5));
      ASSERT_EQ(operation.name, text("operation ", operation.bytes & 0xff));
    }
  }
  stop = true;
  for (auto& writer : writers) writer.join();
  EXPECT_GT(looked, 0u);
}

TEST(BlackBox, ATornEntryIsLeftOutAndCounted) {
  const Box box;
  for (int i = 0; i < 10; ++i) box.box->end(box.box->begin({.bytes = 1}), State::kDone);
  box.segment().records[3].version |= 1;  // its writer died in the middle
  box.segment().records[5].end_ns = 1;    // ended before it began
  const auto read = box.read();
  EXPECT_EQ(read.operations.size(), 8u);
  EXPECT_EQ(read.unreadable, 2u);
  // The next writer of that record gives up its entry; the entry after that is complete.
  for (size_t i = 10; i < kRecords + 10; ++i) box.box->end(box.box->begin({.bytes = 2}), State::kDone);
  EXPECT_EQ(box.read().operations.size(), kRecords - 1);
}

TEST(BlackBox, AnyBytesAreReadOrCorruptAndNothingElse) {
  const Box box;
  box.box->set_names(kOperations, kDtypes);
  for (int i = 0; i < 3; ++i) box.box->group(text("group ", i));
  for (size_t i = 0; i < 2 * kRecords; ++i)
    box.box->end(box.box->begin({.group = static_cast<int>(i % 4)}), State::kDone);
  const auto good = copy_black_box(box.fd.get());
  std::mt19937_64 random(20260218);
  int corrupt = 0, read = 0;
  const auto look = [&](const std::vector<uint64_t>& words) {
    try {
      const auto snapshot = read_black_box(std::as_bytes(std::span(words)));
      ++read;
      EXPECT_LE(snapshot.operations.size(), kRecords);
      EXPECT_LE(snapshot.groups.size(), 64u);
      for (const auto& operation : snapshot.operations) {
        EXPECT_LT(operation.group, static_cast<int>(snapshot.groups.size()));
        EXPECT_EQ(operation.name.find_first_of("\n\x1b"), std::string::npos);
        EXPECT_GE(operation.end_ns == 0 ? UINT64_MAX : operation.end_ns, operation.since_ns());
      }
    } catch (const CorruptError&) {
      ++corrupt;
    }
  };
  const int rounds = test::kSanitized ? 30 : 200;
  for (int round = 0; round < rounds; ++round) {
    auto words = good;
    const size_t header = sizeof(Header) / 8;
    // Randomised: everything; everything but the start of the header; the records; single words.
    const size_t first = round % 4 == 0 ? 0 : round % 4 == 1 ? 4 : header;
    if (round % 4 == 3) {
      for (int i = 0; i < 200; ++i) words[random() % words.size()] ^= uint64_t{1} << (random() % 64);
    } else {
      for (size_t i = first; i < words.size(); ++i) words[i] = round % 8 < 4 ? random() : random() % 9;
    }
    look(words);
  }
  EXPECT_GT(corrupt, 0);
  EXPECT_GT(read, 0);
  EXPECT_THROW(read_black_box(std::as_bytes(std::span(good)).first(good.size() * 8 - 8)), CorruptError);
  EXPECT_THROW(read_black_box(std::span<const std::byte>()), CorruptError);
}

TEST(BlackBox, OnlyABoxIsTakenForOne) {
  const UniqueFd null(::open("/dev/null", O_RDWR)), memory = create_memfd("test", sizeof(Segment));
  const UniqueFd unsealed(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), sizeof(Segment)), 0);
  for (const int fd : {-1, null.get(), memory.get(), unsealed.get()}) {
    EXPECT_THROW(read_black_box(fd), CorruptError) << fd;
    EXPECT_THROW(BlackBox::open(fd), CorruptError) << fd;
    const Variable variable(text(fd));
    EXPECT_EQ(read_black_box(open_black_box(0, 1)->segment()).pid, ::getpid()) << "its own box";
  }
}

TEST(BlackBox, ARankTakesTheLaunchersBoxIfItIsItsOwn) {
  const UniqueFd given = create_black_box(1, 2, "a job");
  ASSERT_EQ(::fcntl(given.get(), F_SETFD, 0), 0);
  const Variable variable(text(given.get()));
  open_black_box(0, 2)->begin({});        // another rank
  open_black_box(1, 3)->begin({});        // another world
  open_black_box(1, 2, true)->begin({});  // a thread
  EXPECT_EQ(read_black_box(given.get()).pid, 0);
  EXPECT_EQ(::fcntl(given.get(), F_GETFD), 0);
  open_black_box(1, 2)->begin({});
  open_black_box(1, 2)->begin({});  // the process's second World
  const auto read = read_black_box(given.get());
  EXPECT_EQ(read.pid, ::getpid());
  EXPECT_EQ(read.pid_start, start_time_of(::getpid()));
  EXPECT_EQ(read.begun, 2u);
  EXPECT_EQ(::fcntl(given.get(), F_GETFD), FD_CLOEXEC) << "processes that the rank starts do not need it";

  const Variable wrong("box");
  EXPECT_THROW(open_black_box(1, 2), InvalidArgument);
}

TEST(BlackBoxFork, SurvivesItsRankAndIsHandedOn) {
  const UniqueFd given = create_black_box(0, 1, "a job");
  const Variable variable(text(given.get()));
  const auto run = [](auto body) {
    const pid_t pid = ::fork();
    if (pid == 0) {
      body();
      ::raise(SIGKILL);
    }
    int status = 0;
    ::waitpid(pid, &status, 0);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    return pid;
  };
  const pid_t first = run([] {
    const auto box = open_black_box(0, 1);
    box->end(box->begin({.bytes = 1}), State::kDone);
    box->begin({.bytes = 2});
  });
  auto read = read_black_box(given.get());
  EXPECT_EQ(read.pid, first);
  ASSERT_EQ(read.operations.size(), 2u);
  EXPECT_EQ(read.operations[0].state, State::kDone);
  EXPECT_EQ(read.operations[1].state, State::kRunning);
  // A process that replaces a dead rank continues the same box; one beside a living rank does not.
  const pid_t second = run([] { open_black_box(0, 1)->begin({.bytes = 3}); });
  EXPECT_EQ(read_black_box(given.get()).pid, second);
  const auto mine = open_black_box(0, 1);
  run([] { open_black_box(0, 1)->begin({.bytes = 4}); });
  read = read_black_box(given.get());
  EXPECT_EQ(read.pid, ::getpid());
  EXPECT_EQ(read.begun, 3u);
}

}  // namespace
}  // namespace muster::shm
