// The format of snapshots: what was written is read back, and every change is detected and located.
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <random>

#include "base/file_text.h"
#include "base/text.h"
#include "checkpoint/archive.h"
#include "checkpoint/container.h"
#include "checkpoint/folder.h"
#include "checkpoint/tensor_header.h"
#include "muster/base/error.h"
#include "support/ask_python.h"
#include "support/ranks.h"

namespace muster::checkpoint {
namespace {

namespace fs = std::filesystem;
using test::message_of;

void write_file(const fs::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

class SnapshotContainer : public testing::Test {
 protected:
  SnapshotContainer() {
    std::string pattern = (fs::temp_directory_path() / "container-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ / "step-7.snapshot.safetensors";
  }
  ~SnapshotContainer() override { fs::remove_all(folder_); }

  static Entry entry(std::string name, at::Tensor tensor, int rank = kShared) {
    return {.item = "model", .name = std::move(name), .kind = "tensor", .rank = rank, .order = 3, .tensor = tensor};
  }
  // Tensors of 240, 40 and 3 bytes: those with the largest elements come first.
  Shard write_small() {
    return write_container(path_, {.steps = 7, .world_size = 2},
                           {entry("weight", at::arange(10, at::kFloat)), entry("bias", at::arange(30, at::kLong)),
                            entry("index", at::arange(3, at::kByte), 1)});
  }
  // A file with this header, a correct checksum, and `tail` zeros after it.
  void forge_header(std::string header, size_t tail = 0) {
    header.resize((kHeaderAt + header.size() + 63) / 64 * 64 - kHeaderAt, ' ');
    const uint64_t length = header.size();
    std::string head(reinterpret_cast<const char*>(&length), sizeof length);
    head += header;
    set_checksum(head);
    write_file(path_, head + std::string(tail, 0));
  }
  // The same with Muster's metadata, and with tensors as safetensors describes them.
  void forge(const std::string& muster, const std::string& tensors = "", size_t tail = 0) {
    forge_header(text(R"({"__metadata__":{"checksum":"0000000000000000","muster":)", nlohmann::json(muster).dump(), "}",
                      tensors.empty() ? "" : ",", tensors, "}"),
                 tail);
  }
  static Entries all_of(const Container& file) {
    Entries all;
    for (size_t i = 0; i < file.entries().size(); ++i) all.push_back(file.read(i));
    return all;
  }
  // Whether the values are read or only verified, the same is wrong.
  std::string refusal() {
    const auto words = message_of<CorruptError>([&] { Container::open(path_).verify(); });
    EXPECT_EQ(message_of<CorruptError>([&] { all_of(Container::open(path_)); }), words);
    return words;
  }

  fs::path folder_, path_;
};

TEST_F(SnapshotContainer, BringsBackEveryDtypeAndShape) {
  Entries entries;
  for (const auto dtype :
       {at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble,
        at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e5m2, at::kFloat8_e5m2fnuz})
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {0}, {3, 0}, {5}, {2, 3, 4}})
      entries.push_back(entry(text(c10::toString(dtype), join(sizes)), at::rand(sizes).mul(100).to(dtype)));
  const Shard shard =
      write_container(path_, {.steps = 7, .world_size = 3, .rank = 2, .shards = {{"a", 5, 6}}}, entries);
  EXPECT_EQ(shard.bytes, fs::file_size(path_));
  EXPECT_EQ(shard.file, "step-7.snapshot.safetensors");

  const Container read = Container::open(path_);
  EXPECT_EQ(read.sum(), shard.sum);
  EXPECT_EQ(read.bytes(), shard.bytes);
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
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.tensor.element_size() > b.tensor.element_size(); });
  for (size_t i = 0; i < entries.size(); ++i) {
    const Entry &before = entries[i], after = read.read(i);
    EXPECT_EQ(after.full_name(), before.full_name());
    EXPECT_EQ(after.kind, "tensor");
    EXPECT_EQ(after.order, 3);
    ASSERT_EQ(after.tensor.scalar_type(), before.tensor.scalar_type());
    ASSERT_EQ(after.tensor.sizes(), before.tensor.sizes()) << before.name;
    if (before.tensor.nbytes() != 0) {
      EXPECT_EQ(std::memcmp(after.tensor.const_data_ptr(), before.tensor.const_data_ptr(), before.tensor.nbytes()), 0);
    }
    EXPECT_EQ(reinterpret_cast<uintptr_t>(after.tensor.const_data_ptr()) % after.tensor.element_size(), 0u);
  }
}

// A buffer may have the name of a parameter, and a map an empty key.
TEST_F(SnapshotContainer, TwoTensorsMayHaveOneName) {
  Entry number{.item = "__metadata__", .name = "", .kind = "number", .tensor = at::arange(2, at::kLong)};
  write_container(path_, {}, {entry("a", at::arange(3)), entry("a", at::arange(4)), number});
  const Entries entries = all_of(Container::open(path_));
  ASSERT_EQ(entries.size(), 3u);
  EXPECT_EQ(entries[0].full_name(), "model/a");
  EXPECT_EQ(entries[1].full_name(), "model/a");
  EXPECT_EQ(entries[1].tensor.numel(), 4);
  EXPECT_EQ(entries[2].full_name(), "__metadata__");
}

// Python's safetensors, if it is there, and otherwise a few lines of Python.
TEST_F(SnapshotContainer, PythonReadsIt) {
  const at::Tensor complex = at::complex(at::tensor({0.5}), at::tensor({-2.0}));
  write_container(path_, {.steps = 7},
                  {entry("a", at::tensor({0.5F, -1.25F}).reshape({2, 1})), entry("b", at::tensor({int64_t{1} << 40})),
                   entry("c", at::tensor({3.0, 0.125}).to(at::kBFloat16)), entry("d", at::tensor({1, 0}).to(at::kBool)),
                   entry("e", at::empty({0, 3})), entry("f", at::tensor({7.0}), 1), entry("g", complex)});
  const auto answers = test::ask_python("unit/snapshot_reference.py", {"read " + path_.string()});
  ASSERT_EQ(answers.size(), 1u);
  std::vector<double> expected{0.5, -1.25, static_cast<double>(int64_t{1} << 40), 3, 0.125, 1, 0};
  const auto* const bytes = static_cast<const unsigned char*>(complex.const_data_ptr());
  expected.insert(expected.end(), bytes, bytes + complex.nbytes());
  expected.push_back(7);  // "rank 1/model/f" is the last name
  EXPECT_EQ(answers[0], expected);
}

TEST_F(SnapshotContainer, ADirectoryNeedsNoMoreThanTheHead) {
  write_small();
  const Container whole = Container::open(path_);
  EXPECT_LT(whole.head().size(), whole.bytes());
  const Container directory = Container::directory(whole.head(), "the head");
  ASSERT_EQ(directory.entries().size(), whole.entries().size());
  for (size_t i = 0; i < whole.entries().size(); ++i) {
    const Entry &there = directory.entries()[i], &expected = whole.entries()[i];
    EXPECT_TRUE(there.tensor.is_meta());
    EXPECT_EQ(there.full_name(), expected.full_name());
    EXPECT_EQ(there.tensor.sizes(), expected.tensor.sizes());
    // The part of the file that begins with the entry.
    const uint64_t begin = directory.extents()[i].begin;
    const at::Tensor part = at::empty({static_cast<int64_t>(whole.bytes() - begin)}, at::kByte);
    whole.read(i, whole.entries().size(), part.mutable_data_ptr());
    for (size_t k = i; k < whole.entries().size(); ++k)
      EXPECT_TRUE(at::equal(directory.entry_in(part, i, k).tensor, whole.read(k).tensor));
  }
}

TEST_F(SnapshotContainer, AFlipOfAnyByteIsFoundAndPlaced) {
  write_small();
  const std::string whole = text_of_file(path_);
  const size_t data = Container::open(path_).head().size();
  const auto name_at = [&](size_t byte) {
    return byte < data + 240 ? "'model/bias'" : byte < data + 240 + 40 ? "'model/weight'" : "'rank 1/model/index'";
  };
  ASSERT_EQ(whole.size(), data + 240 + 40 + 3);
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
  const auto offset = fs::file_size(path_) - (3 * (1 << 20) + 5 * sizeof(float));
  for (const size_t block : {0, 1, 2, 3}) {
    std::string bytes = text_of_file(path_);
    const size_t byte = offset + block * (1 << 20) + 17;
    bytes[byte] = static_cast<char>(bytes[byte] ^ 4);
    write_file(path_, bytes);
    const auto message = refusal();
    EXPECT_CONTAINS(message, text("byte ", offset + block * (1 << 20), ": tensor 'model/large' is not as it was"));
    bytes[byte] = static_cast<char>(bytes[byte] ^ 4);
    write_file(path_, bytes);
  }
}

// In a file of a usual size: tensors of a few bytes, and of several blocks.
TEST_F(SnapshotContainer, AThousandFlippedBitsAndTwoHundredCutsAreNamed) {
  Entries entries;
  for (int64_t i = 0; i < 24; ++i) entries.push_back(entry(text("layer", i, ".weight"), at::rand({i * i * 97 + 1})));
  entries.push_back(entry("embedding", at::rand({(1 << 18) + 3})));
  write_container(path_, {.steps = 7}, entries);
  const Container file = Container::open(path_);
  const auto name_at = [&](uint64_t byte) {
    for (size_t i = 0; i < file.extents().size(); ++i)
      if (byte >= file.extents()[i].begin && byte < file.extents()[i].end)
        return "'" + file.entries()[i].full_name() + "'";
    return std::string("header");
  };
  std::mt19937_64 random(7);
  std::fstream changing(path_, std::ios::binary | std::ios::in | std::ios::out);
  for (int i = 0; i < 1000; ++i) {
    // Every tenth one in the header.
    const uint64_t byte = random() % (i % 10 == 0 ? file.head().size() : file.bytes());
    const auto flip = [&] {
      changing.seekg(static_cast<std::streamoff>(byte));
      const int before = changing.get();
      changing.seekp(static_cast<std::streamoff>(byte));
      changing.put(static_cast<char>(before ^ 1 << i % 8)).flush();
    };
    flip();
    const auto message = message_of<CorruptError>([&] { Container::open(path_).verify(); });
    flip();
    EXPECT_CONTAINS(message, path_.string() + ", byte ");
    if (byte >= file.head().size()) {
      EXPECT_CONTAINS(message, name_at(byte));
    }
    if (HasFailure()) FAIL() << "byte " << byte << ": " << message;
  }
  for (int i = 0; i < 200; ++i) {
    const fs::path cut = folder_ / "cut";
    const uint64_t bytes = random() % (i % 10 == 0 ? file.head().size() : file.bytes());
    fs::copy_file(path_, cut, fs::copy_options::overwrite_existing);
    fs::resize_file(cut, bytes);
    const auto message = message_of<CorruptError>([&] { Container::open(cut).verify(); });
    EXPECT_CONTAINS(message, text(cut.string(), ", byte ", bytes, ": the file ends here"));
    if (bytes >= file.head().size()) {
      EXPECT_CONTAINS(message, name_at(bytes));
    }
    if (HasFailure()) FAIL() << bytes << " bytes: " << message;
  }
}

TEST_F(SnapshotContainer, AFileOfAnotherLengthIsRefused) {
  write_small();
  const std::string whole = text_of_file(path_);
  for (size_t length = 0; length < whole.size(); ++length) {
    write_file(path_, whole.substr(0, length));
    const auto message = refusal();
    EXPECT_CONTAINS(message, text("byte ", length, ": the file ends here"));
    if (HasFailure()) FAIL() << "length " << length << ": " << message;
  }
  EXPECT_CONTAINS(message_of<CorruptError>([&] {
                    write_file(path_, whole.substr(0, whole.size() - 50));
                    Container::open(path_);
                  }),
                  "within tensor 'model/bias'");
  write_file(path_, whole + "x");
  EXPECT_CONTAINS(refusal(), "and more follow");
}

TEST_F(SnapshotContainer, AnotherFileIsRefused) {
  write_file(path_, std::string(1000, 'x'));
  EXPECT_CONTAINS(refusal(), "byte 8: this is not a snapshot");
  forge(R"({"version":3})");
  EXPECT_CONTAINS(message_of<Unavailable>([&] { Container::open(path_); }),
                  "byte 8: its format is version 3, and this Muster reads version 2");
  fs::remove(path_);
  EXPECT_CONTAINS(message_of<Unavailable>([&] { Container::open(path_); }), "cannot read " + path_.string());
  EXPECT_CONTAINS(message_of<Unavailable>([&] { Container::open(folder_); }), "cannot read " + folder_.string());
}

TEST_F(SnapshotContainer, AHeaderThatCannotBeIsRefusedThoughItsChecksumIsRight) {
  const auto with = [](const std::string& tensors, const std::string& shards = "", const std::string& bytes = "64") {
    return R"({"version":2,"steps":7,"world_size":1,"rank":-1,"data_bytes":)" + bytes + R"(,"shards":[)" + shards +
           R"(],"tensors":[)" + tensors + "]}";
  };
  const auto with_shard = [&](const std::string& file) {
    return with("", R"({"file":")" + file + R"(","bytes":1,"sum":1})", "0");
  };
  const auto about = [&](const std::string& sums, const std::string& more = "") {
    return with(R"({"item":"m","name":"w","kind":"tensor","rank":-1,"order":0,"sums":)" + sums + more + "}");
  };
  const auto tensor = [](const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"("m/w":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
  };
  forge(with_shard("step-7.shard"));
  EXPECT_EQ(Container::open(path_).about().shards.size(), 1U);
  const std::string sum = std::to_string(checksum(std::string(64, 0)));
  forge(about("[" + sum + "]"), tensor("F32", "[16]", "[0,64]"), 64);
  EXPECT_EQ(Container::open(path_).entries().size(), 1U);  // forge() can make a valid file
  struct Case {
    std::string muster, tensors, words;
  };
  for (const auto& [muster, tensors, words] : std::vector<Case>{
           {"", "", "not JSON"},
           {"[1]", "", "not JSON"},
           {"{}", "", "lacks something"},
           {R"({"version":2,"steps":"x","world_size":1,"rank":-1,"shards":[],"data_bytes":0,"tensors":[]})", "",
            "lacks something"},
           {with("{}"), tensor("F32", "[16]", "[0,64]"), "lacks something"},
           {about("[]"), tensor("F32", "[16]", "[0,64]").replace(1, 3, "n/w"), "lacks something: tensor 'm/w'"},
           {with("", "", "9223372036854775808"), "", "do not fit into a file"},
           {with_shard("../other/step-7.shard"), "", "is not the name of a shard"},
           {with_shard("/etc/passwd"), "", "is not the name of a shard"},
           {with_shard(".."), "", "is not the name of a shard"},
           {with_shard(""), "", "is not the name of a shard"},
           {about("[0]"), tensor("Flat", "[16]", "[0,64]"), "unknown dtype 'Flat'"},
           {about("[0]", R"(,"dtype":"QInt8")"), tensor("U8", "[64,1]", "[0,64]"), "unknown dtype 'QInt8'"},
           {about("[0]"), tensor("F32", "[-1]", "[0,64]"), "impossible shape"},
           {about("[]"), tensor("F32", "[4294967296,4294967296]", "[0,0]"), "impossible shape"},
           {about("[]"), tensor("F32", "[0,1099511627776,1099511627776]", "[0,0]"), "impossible shape"},
           {about("[0]"), tensor("F32", "[15]", "[4,64]"), "does not lie"},
           {about("[0]"), tensor("F32", "[16]", "[0,128]"), "does not have the bytes of its shape"},
           {about("[]"), tensor("F32", "[16]", "[0,64]"), "does not lie"},
           {about("[0]"), tensor("F32", "[1000]", "[0,4000]"), "does not lie"},
           {about("[0]", R"(,"dtype":"ComplexFloat")"), tensor("U8", "[16,4]", "[0,64]"),
            "does not have the bytes of dtype 'ComplexFloat'"},
           {about("[0]", R"(,"dtype":"ComplexFloat")"), tensor("F32", "[2,8]", "[0,64]"),
            "does not have the bytes of dtype"},
           {about("[0]", R"(,"dtype":"ComplexFloat")"), tensor("U8", "[]", "[0,1]"), "63 bytes belong to no tensor"},
           {with(""), "", "64 bytes belong to no tensor"},
           {about("[0]"), tensor("F32", "[16]", "[0,64]") + R"(,"v":{"dtype":"U8","shape":[0],"data_offsets":[64,64]})",
            "2 tensors, of which 1 are described"},
           {with(R"({"item":"m","name":"w","kind":"","rank":-1,"order":0,"sums":[]},)"
                 R"({"item":"m","name":"w","kind":"","rank":-1,"order":1,"sums":[]})"),
            tensor("F32", "[0]", "[0,0]") + R"(,"v":{"dtype":"U8","shape":[64],"data_offsets":[0,64]})",
            "lacks something: tensor 'm/w'"},
           {with(R"({"item":"m","name":"w","kind":"","rank":-1,"order":0,"sums":[0]},)"
                 R"({"item":"m","name":"v","kind":"","rank":-1,"order":1,"sums":[0]})"),
            tensor("F32", "[8]", "[0,32]") + R"(,"m/v":{"dtype":"F64","shape":[4],"data_offsets":[32,64]})",
            "has larger elements than the one before it"},
           {with("", "", "0"), tensor("F32", "[0]", "[0,0]"), "1 tensors, of which 0 are described"},
       }) {
    SCOPED_TRACE(muster + tensors);
    forge(muster, tensors, 64);
    EXPECT_CONTAINS(refusal(), words);
  }
  forge_header(R"({"__metadata__":{"checksum":"0000000000000000",)");
  EXPECT_CONTAINS(refusal(), "the header is not a JSON object");
  forge_header(R"({"__metadata__":{"checksum":"0000000000000000"}})");
  EXPECT_CONTAINS(refusal(), "lacks something");
}

TEST_F(SnapshotContainer, WhatCannotBeWrittenLeavesNothing) {
  EXPECT_CONTAINS(
      message_of<Unavailable>([&] { write_container(folder_ / "none" / "step-1.snapshot.safetensors", {}, {}); }),
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

// Jobs that only read have a folder together, and one that saves waits until none of them has it.
TEST(SnapshotFolderProcess, IsReadByManyProcesses) {
  const auto path = fs::temp_directory_path() / text("muster-readers-", ::getpid());
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t other = ::fork();
  if (other == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    Folder folder(path);
    folder.claim(Folder::Use::kReads);
    [[maybe_unused]] const auto written = ::write(ready[1], "x", 1);
    for (;;) ::pause();
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  {
    Folder mine(path), again(path);
    mine.claim(Folder::Use::kReads);
    again.claim(Folder::Use::kReads);
    EXPECT_THROW(again.claim(), Unavailable);
    again.claim(Folder::Use::kReads);  // which it still may
    ::kill(other, SIGKILL);
    again.claim();  // though `mine` reads: the process has it
    mine.claim(Folder::Use::kReads);
  }
  ::waitpid(other, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  fs::remove_all(path);
}

// What follows an archive's entries is recursive.
TEST(SnapshotArchive, AForgedDepthIsRefused) {
  const auto number = [](int64_t value) { return at::tensor(value); };
  for (const char* const kind : {"archive", "tuple"}) {
    Entries entries;
    for (int64_t i = 0; i < 500'000; ++i)
      entries.push_back({.item = "a", .name = "x", .kind = i == 0 ? "archive" : kind, .order = i, .tensor = number(1)});
    entries.push_back({.item = "a", .name = "x", .kind = "int", .order = 500'000, .tensor = number(7)});
    EXPECT_CONTAINS(message_of<CorruptError>([&] { load_archive(entries, [](auto&) {}); }),
                    "'a/x' is not a valid entry of an archive");
  }
  // A list of tensors that has an integer.
  EXPECT_CONTAINS(message_of<CorruptError>([&] {
                    load_archive({{.item = "a", .kind = "archive", .tensor = number(1)},
                                  {.item = "a", .name = "x", .kind = "tensors", .tensor = number(1)},
                                  {.item = "a", .name = "x/0", .kind = "int", .tensor = number(7)}},
                                 [](auto&) {});
                  }),
                  "is not a valid entry of an archive");
  // As deep as may be.
  const auto wrapped = [&](int times) {
    return [times](torch::serialize::OutputArchive& out) {
      std::vector<torch::serialize::OutputArchive> all;
      for (int i = 0; i < times; ++i) all.emplace_back(out.compilation_unit());
      for (int i = times; i-- > 0;) {
        if (i + 1 == times) all[static_cast<size_t>(i)].write("x", c10::IValue(int64_t{7}));
        (i == 0 ? out : all[static_cast<size_t>(i - 1)]).write("a", all[static_cast<size_t>(i)]);
      }
    };
  };
  int loaded = 0;
  load_archive(save_archive(wrapped(99)), [&](auto&) { ++loaded; });
  EXPECT_EQ(loaded, 1);
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { save_archive(wrapped(101)); }), "archives within each other");
}

}  // namespace
}  // namespace muster::checkpoint
