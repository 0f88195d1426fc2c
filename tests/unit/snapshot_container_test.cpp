// The format of snapshots: what was written is read back, and every change is detected and located.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>

#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/folder.h"
#include "muster/base/error.h"
#include "support/ranks.h"

namespace muster::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::message_of;

std::string read_file(const fs::path& path) {
  std::stringstream content;
  content << std::ifstream(path, std::ios::binary).rdbuf();
  return content.str();
}
void write_file(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

class SnapshotContainer : public testing::Test {
 protected:
  SnapshotContainer() {
    std::string pattern = (fs::temp_directory_path() / "container-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ / "step-7.snapshot";
  }
  ~SnapshotContainer() override { fs::remove_all(folder_); }

  static Entry entry(std::string name, at::Tensor tensor, int rank = kShared) {
    return {.item = "model", .name = std::move(name), .kind = "tensor", .rank = rank, .order = 3, .tensor = tensor};
  }
  // A few hundred bytes, with padding after a tensor.
  Shard write_small() {
    return write_container(path_, {.steps = 7, .world_size = 2},
                           {entry("weight", at::arange(10, at::kFloat)), entry("bias", at::arange(30, at::kLong)),
                            entry("index", at::arange(3, at::kByte), 1)});
  }
  // A file with `header`, correct checksums, and `tail` zeros after it.
  void forge(std::string header, size_t tail = 0) {
    header.resize((header.size() + 63) / 64 * 64, ' ');
    std::string bytes(64, 0);
    const uint32_t version = kFormatVersion;
    const uint64_t header_bytes = header.size(), file_bytes = 64 + header.size() + tail, sum = checksum(header);
    std::memcpy(bytes.data(), "MUSTSNAP", 8);
    std::memcpy(bytes.data() + 8, &version, 4);
    std::memcpy(bytes.data() + 16, &header_bytes, 8);
    std::memcpy(bytes.data() + 24, &file_bytes, 8);
    std::memcpy(bytes.data() + 32, &sum, 8);
    const uint64_t own = checksum(std::string_view(bytes).substr(0, 40));
    std::memcpy(bytes.data() + 40, &own, 8);
    write_file(path_, bytes + header + std::string(tail, 0));
  }
  std::string refusal() {
    return message_of<CorruptError>([&] { Container::read(path_); });
  }

  fs::path folder_, path_;
};

TEST_F(SnapshotContainer, BringsBackEveryDtypeAndShape) {
  Entries entries;
  for (const auto dtype : {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat,
                           at::kDouble, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e5m2})
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {3, 0}, {5}, {2, 3, 4}})
      entries.push_back(entry(text(c10::toString(dtype), join(sizes)), at::rand(sizes).mul(100).to(dtype)));
  const Shard shard =
      write_container(path_, {.steps = 7, .world_size = 3, .rank = 2, .shards = {{"a", 5, 6}}}, entries);
  EXPECT_EQ(shard.bytes, fs::file_size(path_));
  EXPECT_EQ(shard.file, "step-7.snapshot");

  const Container read = Container::read(path_);
  EXPECT_EQ(read.sum(), shard.sum);
  for (const About& about : {read.about(), read_about(path_)}) {
    EXPECT_EQ(about.steps, 7);
    EXPECT_EQ(about.world_size, 3);
    EXPECT_EQ(about.rank, 2);
    ASSERT_EQ(about.shards.size(), 1u);
    EXPECT_EQ(about.shards[0].file, "a");
    EXPECT_EQ(about.shards[0].bytes, 5u);
    EXPECT_EQ(about.shards[0].sum, 6u);
  }
  ASSERT_EQ(read.entries().size(), entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    const auto &before = entries[i], &after = read.entries()[i];
    EXPECT_EQ(after.full_name(), before.full_name());
    EXPECT_EQ(after.kind, "tensor");
    EXPECT_EQ(after.order, 3);
    ASSERT_EQ(after.tensor.scalar_type(), before.tensor.scalar_type());
    ASSERT_EQ(after.tensor.sizes(), before.tensor.sizes()) << before.name;
    if (before.tensor.nbytes() != 0) {
      EXPECT_EQ(std::memcmp(after.tensor.const_data_ptr(), before.tensor.const_data_ptr(), before.tensor.nbytes()), 0);
    }
    EXPECT_EQ(reinterpret_cast<uintptr_t>(after.tensor.const_data_ptr()) % 16, 0u);
  }
}

TEST_F(SnapshotContainer, ADirectoryNeedsNoMoreThanTheHead) {
  write_small();
  const Container whole = Container::read(path_);
  EXPECT_LT(whole.head().size(), whole.bytes().nbytes());
  const Container directory = Container::directory(whole.head(), "the head");
  ASSERT_EQ(directory.entries().size(), whole.entries().size());
  for (size_t i = 0; i < whole.entries().size(); ++i) {
    const Entry &there = directory.entries()[i], &expected = whole.entries()[i];
    EXPECT_TRUE(there.tensor.is_meta());
    EXPECT_EQ(there.full_name(), expected.full_name());
    EXPECT_EQ(there.tensor.sizes(), expected.tensor.sizes());
    // A part of the file that begins at the entry.
    const auto [begin, end] = directory.extents()[i];
    const at::Tensor part =
        whole.bytes().narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin)).clone();
    EXPECT_TRUE(at::equal(directory.entry_in(part, begin, i).tensor, expected.tensor));
  }
}

TEST_F(SnapshotContainer, AFlipOfAnyByteIsFoundAndPlaced) {
  write_small();
  const std::string whole = read_file(path_);
  const size_t data = 64 + static_cast<size_t>(*reinterpret_cast<const uint64_t*>(whole.data() + 16));
  const auto name_at = [&](size_t byte) {  // tensors have 40, 240 and 3 bytes
    return byte < data + 64 ? "'model/weight'" : byte < data + 64 + 256 ? "'model/bias'" : "'rank 1/model/index'";
  };
  ASSERT_EQ(whole.size(), data + 64 + 256 + 64);
  for (size_t byte = 0; byte < whole.size(); ++byte) {
    std::string flipped = whole;
    flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << (byte % 8)));
    write_file(path_, flipped);
    const auto message = refusal();
    EXPECT_CONTAINS(message, path_.string() + ", byte ");
    if (byte >= data) {
      EXPECT_CONTAINS(message, name_at(byte));
    }
    if (HasFailure()) FAIL() << "byte " << byte << ": " << message;
  }
}

TEST_F(SnapshotContainer, AFlipInALargeTensorIsPlacedInItsBlock) {
  write_container(path_, {.steps = 7},
                  {entry("first", at::arange(16, at::kFloat)), entry("large", at::rand({3 * (1 << 18) + 5}))});
  const auto entries = Container::read(path_).entries();
  const auto offset = fs::file_size(path_) - (3 * (1 << 20) + 64);
  for (const size_t block : {0, 1, 2, 3}) {
    std::string bytes = read_file(path_);
    const size_t byte = offset + block * (1 << 20) + 17;
    bytes[byte] = static_cast<char>(bytes[byte] ^ 4);
    write_file(path_, bytes);
    const auto message = refusal();
    EXPECT_CONTAINS(message, text("byte ", offset + block * (1 << 20), ": tensor 'model/large' is not as it was"));
    bytes[byte] = static_cast<char>(bytes[byte] ^ 4);
    write_file(path_, bytes);
  }
}

TEST_F(SnapshotContainer, AFileOfAnotherLengthIsRefused) {
  write_small();
  const std::string whole = read_file(path_);
  for (size_t length = 0; length < whole.size(); ++length) {
    write_file(path_, whole.substr(0, length));
    const auto message = refusal();
    EXPECT_CONTAINS(message, text("byte ", length, ": the file ends here"));
    if (HasFailure()) FAIL() << "length " << length << ": " << message;
  }
  EXPECT_CONTAINS(message_of<CorruptError>([&] {
                    write_file(path_, whole.substr(0, whole.size() - 130));
                    Container::read(path_);
                  }),
                  "within tensor 'model/bias'");
  write_file(path_, whole + "x");
  EXPECT_CONTAINS(refusal(), "and more follow");
}

TEST_F(SnapshotContainer, AnotherFileIsRefused) {
  write_file(path_, std::string(1000, 'x'));
  EXPECT_CONTAINS(refusal(), "byte 0: this is not a snapshot");
  write_small();
  std::string bytes = read_file(path_);
  bytes[8] = 3;
  write_file(path_, bytes);
  EXPECT_CONTAINS(refusal(), "byte 8: its format is version 3, and this Muster reads version 2");
  fs::remove(path_);
  EXPECT_CONTAINS(message_of<Unavailable>([&] { Container::read(path_); }), "cannot read " + path_.string());
  EXPECT_CONTAINS(message_of<Unavailable>([&] { Container::read(folder_); }), "cannot read " + folder_.string());
}

TEST_F(SnapshotContainer, AHeaderThatCannotBeIsRefusedThoughItsChecksumIsRight) {
  const auto with = [](const std::string& tensors) {
    return R"({"steps":7,"world_size":1,"rank":-1,"shards":[],"tensors":[)" + tensors + "]}";
  };
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offset,
                         const std::string& bytes, const std::string& sums) {
    return R"({"item":"m","name":"w","kind":"tensor","rank":-1,"order":0,"dtype":")" + dtype + R"(","shape":)" + shape +
           R"(,"offset":)" + offset + R"(,"bytes":)" + bytes + R"(,"sums":)" + sums + "}";
  };
  const auto with_shard = [](const std::string& file) {
    return R"({"steps":7,"world_size":1,"rank":-1,"shards":[{"file":")" + file +
           R"(","bytes":1,"sum":1}],"tensors":[]})";
  };
  forge(with_shard("step-7.shard"));
  EXPECT_EQ(Container::read(path_).about().shards.size(), 1U);
  forge(with(""));
  EXPECT_TRUE(Container::read(path_).entries().empty());  // forge() can make a valid file
  for (const auto& [header, words] : std::vector<std::pair<std::string, std::string>>{
           {"", "not JSON"},
           {"[1]", "not JSON"},
           {"{}", "lacks something"},
           {R"({"steps":"x","world_size":1,"rank":-1,"shards":[],"tensors":[]})", "lacks something"},
           {with("{}"), "lacks something"},
           {with_shard("../other/step-7.shard"), "is not the name of a shard"},
           {with_shard("/etc/passwd"), "is not the name of a shard"},
           {with_shard(".."), "is not the name of a shard"},
           {with_shard(""), "is not the name of a shard"},
           {with(tensor("Flat", "[1]", "320", "4", "[0]")), "unknown dtype 'Flat'"},
           {with(tensor("QInt8", "[1]", "320", "1", "[0]")), "unknown dtype"},
           {with(tensor("Float", "[-1]", "320", "4", "[0]")), "impossible shape"},
           {with(tensor("Float", "[4294967296,4294967296]", "320", "0", "[]")), "impossible shape"},
           {with(tensor("Float", "[1]", "64", "4", "[0]")), "does not lie"},
           {with(tensor("Float", "[1]", "320", "8", "[0]")), "does not lie"},
           {with(tensor("Float", "[1]", "320", "4", "[]")), "does not lie"},
           {with(tensor("Float", "[1000]", "320", "4000", "[0]")), "does not lie"},
       }) {
    SCOPED_TRACE(header);
    forge(header, 64);
    EXPECT_CONTAINS(refusal(), words);
  }
  forge(with(""), 64);
  EXPECT_CONTAINS(refusal(), "bytes that belong to no tensor");
}

TEST_F(SnapshotContainer, WhatCannotBeWrittenLeavesNothing) {
  EXPECT_CONTAINS(message_of<Unavailable>([&] { write_container(folder_ / "none" / "step-1.snapshot", {}, {}); }),
                  "cannot write");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { write_container(path_, {}, {entry("\xff", at::arange(3))}); }),
                  "must be UTF-8");
  EXPECT_TRUE(fs::is_empty(folder_));
}

// Two trainings in one folder would remove each other's snapshots.
TEST(SnapshotFolderProcess, BelongsToOneProcessAndIsFreeWhenThatIsKilled) {
  const auto path = fs::temp_directory_path() / text("muster-claim-", ::getpid());
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Folder folder(path);
    folder.claim();
    [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  Folder mine(path), again(path);
  try {
    mine.claim();
    ADD_FAILURE() << "two have it";
  } catch (const Unavailable& error) {
    EXPECT_NE(std::string(error.what()).find("another job has its snapshots in " + path.string()), std::string::npos);
  }
  ::kill(other, SIGKILL);  // it is not reaped yet
  mine.claim();
  again.claim();
  ::waitpid(other, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  fs::remove_all(path);
}

}  // namespace
}  // namespace muster::checkpoint
