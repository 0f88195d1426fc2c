// Reports about black boxes that are made here.

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <random>

#include "base/text.h"
#include "launch/black_box/black_box_report.h"
#include "launch/black_box/black_box_sources.h"
#include "launch/black_box/black_box_trace.h"
#include "launch/kit/text_table.h"
#include "muster/base/error.h"
#include "shm/black_box.h"
#include "support/sanitized.h"

namespace muster::launch {
namespace {

using shm::BlackBoxOperation;
using shm::kNoSequence;
using State = shm::BlackBoxState;

constexpr uint64_t kSecond = 1'000'000'000, kNow = 1000 * kSecond;

// An operation of group 0 that began `ago` before now. If it has ended, it took half of that time.
BlackBoxOperation operation(uint64_t sequence, State state, uint64_t ago = 2 * kSecond) {
  BlackBoxOperation made{.ticket = sequence, .group = 0, .name = "all_reduce", .sequence = sequence, .state = state};
  made.posted_ns = kNow - ago;
  if (state != State::kPosted) made.start_ns = kNow - ago;
  if (!made.under_way()) made.end_ns = kNow - ago / 2;
  return made;
}

JobBoxes job_of(const std::vector<std::vector<BlackBoxOperation>>& ranks) {
  JobBoxes job{.job = "a job", .taken_ns = kNow};
  for (const auto& operations : ranks) {
    RankBox rank{.end = "running"};
    rank.box.rank = static_cast<int>(job.ranks.size());
    rank.box.world_size = static_cast<int>(ranks.size());
    rank.box.groups = {{"world", ranks.size(), 1}};
    rank.box.operations = operations;
    job.ranks.push_back(std::move(rank));
  }
  return job;
}

TEST(BlackBoxReport, NumbersForPeople) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1 KiB");
  EXPECT_EQ(human_bytes(1'258'291), "1.2 MiB");
  EXPECT_EQ(human_bytes(64 << 20), "64 MiB");
  EXPECT_EQ(human_bytes((1 << 20) - 1), "1 MiB");
  EXPECT_EQ(human_bytes(UINT64_MAX), "16 EiB");
  EXPECT_EQ(human_time(999), "999 ns");
  EXPECT_EQ(human_time(45'600), "45.6 µs");
  EXPECT_EQ(human_time(3'100'000'000), "3.1 s");
  EXPECT_EQ(human_ranks({5, 0, 1, 2, 3, 1}), "0-3, 5");
  EXPECT_EQ(human_ranks({1, 0}), "0, 1");
  EXPECT_EQ(human_ranks({}), "");
}

TEST(BlackBoxReport, NamesWhoHoldsUpTheOthers) {
  const auto waits = std::vector{operation(11, State::kDone, 4 * kSecond), operation(12, State::kRunning)};
  const auto late = std::vector{operation(11, State::kDone, 4 * kSecond)};
  EXPECT_EQ(diagnosis(job_of({waits, late, waits, waits})),
            "group 'world' of 4 ranks:\n"
            "  ranks 0, 2, 3: all_reduce #12, running for 2.0 s\n"
            "  rank 1: all_reduce #11, done 2.0 s ago\n"
            "  => rank 1 has not begun all_reduce #12, for which ranks 0, 2, 3 wait\n"
            "  => rank 1 (running) is in no operation of Muster\n");
  EXPECT_EQ(diagnosis(job_of({waits, {operation(12, State::kPosted)}, {}})),
            "group 'world' of 3 ranks:\n"
            "  rank 0: all_reduce #12, running for 2.0 s\n"
            "  rank 1: no collective yet, and 1 more posted\n"
            "  rank 2: no collective yet\n"
            "  => ranks 1, 2 have not begun all_reduce #12, for which rank 0 waits\n"
            "  => rank 1 (running) is in no operation of Muster\n"
            "  => rank 2 (running) is in no operation of Muster\n");
}

TEST(BlackBoxReport, SaysWhereNobodyIsMissing) {
  const auto in = std::vector{operation(3, State::kRunning)}, through = std::vector{operation(3, State::kDone)};
  EXPECT_EQ(diagnosis(job_of({in, in})),
            "group 'world' of 2 ranks:\n  ranks 0, 1: all_reduce #3, running for 2.0 s\n"
            "  => all are in all_reduce #3: nobody is missing\n");
  EXPECT_EQ(diagnosis(job_of({through, in})),
            "group 'world' of 2 ranks:\n  rank 0: all_reduce #3, done 1.0 s ago\n"
            "  rank 1: all_reduce #3, running for 2.0 s\n  => rank 1 is still in all_reduce #3; rank 0 has left it\n");
  EXPECT_EQ(diagnosis(job_of({through, through})),
            "group 'world' of 2 ranks:\n  ranks 0, 1: all_reduce #3, done 1.0 s ago\n");
  EXPECT_EQ(diagnosis(job_of({{}, {}})), "group 'world' of 2 ranks:\n  ranks 0, 1: no collective yet\n");
}

TEST(BlackBoxReport, SeesThatRanksDisagree) {
  auto other = operation(3, State::kRunning);
  other.name = "barrier";
  EXPECT_NE(diagnosis(job_of({{operation(3, State::kRunning)}, {other}}))
                .find("=> #3 is not the same operation on all ranks\n"),
            std::string::npos);
}

TEST(BlackBoxReport, GroupsAreMatchedByNameAndMembers) {
  auto job =
      job_of({{operation(3, State::kRunning)}, {operation(9, State::kRunning)}, {operation(3, State::kRunning)}});
  for (const size_t rank : {0, 2}) job.ranks[rank].box.groups = {{"tp", 2, 77}};
  job.ranks[1].box.groups = {{"tp", 2, 78}};  // its peer has not joined
  EXPECT_EQ(diagnosis(job),
            "group 'tp' of 2 ranks:\n  ranks 0, 2: all_reduce #3, running for 2.0 s\n"
            "  => all are in all_reduce #3: nobody is missing\n"
            "group 'tp' of 2 ranks, of which 1 never joined it:\n  rank 1: all_reduce #9, running for 2.0 s\n"
            "  => all are in all_reduce #9: nobody is missing\n");
}

// The boxes of ranks of other hosts are on these.
TEST(BlackBoxReport, NothingIsSaidOfRanksWhoseBoxesAreElsewhere) {
  auto job = job_of({{operation(3, State::kRunning)}, {operation(3, State::kRunning)}});
  for (auto& rank : job.ranks) {
    rank.box.world_size = 4;
    rank.box.groups = {{"world", 4, 1}};
  }
  EXPECT_EQ(diagnosis(job),
            "group 'world' of 4 ranks, of which 2 have no box here:\n"
            "  ranks 0, 1: all_reduce #3, running for 2.0 s\n"
            "  => all of these are in all_reduce #3\n");
}

// A job whose rank 0 was replaced: its box has only the second of the others' groups.
TEST(BlackBoxReport, ARankThatCameLaterIsInTheGroupsOfItsTime) {
  const std::vector<std::vector<uint64_t>> meetings = {{2}, {1, 2}, {1, 2, 2}};  // in the order of the boxes' ages
  const std::vector<int> everybody = {0, 1, 2};
  std::vector<UniqueFd> boxes;
  std::vector<SavedBox> saved;
  for (const size_t rank : {1, 2, 0}) {
    boxes.push_back(shm::create_black_box(static_cast<int>(rank), 3, "a job"));
    const auto box = shm::BlackBox::open(boxes.back().get());
    const std::vector<std::string_view> names = {"all_reduce"};
    box->set_names(names, {});
    for (const uint64_t meeting : meetings[rank])
      box->begin({.group = box->group("world", everybody, meeting), .sequence = 5 * meeting});
    saved.push_back({boxes.back().get(), "running"});
  }
  const auto file = std::filesystem::path(testing::TempDir()) / text("later-", ::getpid());
  write_black_boxes(file, saved);
  const JobBoxes job = read_black_boxes(file);
  std::filesystem::remove(file);
  std::vector<std::vector<std::string>> names;
  for (const auto& rank : job.ranks) {
    auto& of_rank = names.emplace_back();
    for (const auto& group : rank.box.groups) of_rank.push_back(group.name);
  }
  using Names = std::vector<std::string>;
  EXPECT_EQ(names, (std::vector<Names>{{"world (2)"}, {"world", "world (2)"}, {"world", "world (2)", "world (3)"}}));
  const std::string words = diagnosis(job);
  EXPECT_NE(words.find("group 'world' of 3 ranks, of which 1 never joined it:\n  ranks 1, 2: all_reduce #5, "),
            std::string::npos)
      << words;
  EXPECT_NE(words.find("group 'world (2)' of 3 ranks:\n  ranks 0-2: all_reduce #10, "), std::string::npos) << words;
}

TEST(BlackBoxReport, MessagesAreNoPartOfTheOrder) {
  auto message = operation(0, State::kRunning, 3 * kSecond);
  message.name = "recv";
  message.sequence = kNoSequence;
  message.peer = 1;
  message.bytes = 8;
  const auto done = operation(3, State::kDone);
  EXPECT_EQ(diagnosis(job_of({{message, done}, {done}})),
            "group 'world' of 2 ranks:\n  ranks 0, 1: all_reduce #3, done 1.0 s ago\n"
            "  rank 0: recv (peer 1), 8 B, running for 3.0 s\n");
}

TEST(BlackBoxReport, TheTableIsByTimeAndBounded) {
  const auto job = job_of({{operation(1, State::kDone, 5 * kSecond), operation(2, State::kDone, 3 * kSecond)},
                           {operation(1, State::kTimedOut, 4 * kSecond), operation(2, State::kPosted, kSecond)}});
  EXPECT_EQ(operations_table(job, 10),
            "  seconds  rank  group  #  operation   bytes   took  state\n"
            "-5.000000     0  world  1  all_reduce      -  2.5 s  done\n"
            "-4.000000     1  world  1  all_reduce      -  2.0 s  timed out\n"
            "-3.000000     0  world  2  all_reduce      -  1.5 s  done\n"
            "-1.000000     1  world  2  all_reduce      -      -  posted\n");
  EXPECT_EQ(operations_table(job, 1),
            "  seconds  rank  group  #  operation   bytes   took  state\n"
            "-3.000000     0  world  2  all_reduce      -  1.5 s  done\n"
            "-1.000000     1  world  2  all_reduce      -      -  posted\n");
  EXPECT_EQ(operations_table(job_of({{}}), 10), "no operations\n");
}

TEST(BlackBoxReport, BoxesOfAnyBytesAreDescribed) {
  const UniqueFd fd = shm::create_black_box(0, 2, "a job");
  const auto box = shm::BlackBox::open(fd.get());
  const int group = box->group("world\xff\n");
  for (uint64_t i = 0; i < 5000; ++i) {
    const auto ticket = box->begin({.group = group, .bytes = i, .sequence = i % 3 == 0 ? kNoSequence : i});
    if (i % 5 != 0) box->end(ticket, State::kDone);
  }
  const auto good = shm::copy_black_box(fd.get());
  std::mt19937_64 random(7);
  int described = 0;
  for (int round = 0; round < (test::kSanitized ? 3 : 12); ++round) {
    JobBoxes job{.job = "a job", .taken_ns = random() % 2 ? shm::monotonic_ns() : random()};
    for (int rank = 0; rank < 2; ++rank) {
      auto words = good;
      for (int flips = 0; flips < 5000; ++flips)
        words[4 + random() % (words.size() - 4)] ^= uint64_t{1} << random() % 64;
      try {
        job.ranks.push_back({shm::read_black_box(std::as_bytes(std::span(words))), "gone"});
      } catch (const CorruptError&) {
      }
    }
    described += static_cast<int>(job.ranks.size());
    const auto words = describe_ranks(job) + operations_table(job, 4096) + diagnosis(job) + trace_json(job);
    EXPECT_EQ(words.find('\x1b'), std::string::npos);
    for (const auto& rank : job.ranks) EXPECT_EQ(last_operations(rank.box, job.taken_ns, 3).size(), 3u);
  }
  EXPECT_GT(described, 0);
}

}  // namespace
}  // namespace muster::launch
