// muster checkpoint: ls, verify, diff and convert, on snapshots and other files.
#include <gmock/gmock.h>
#include <sys/stat.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "base/text.h"
#include "checkpoint/container.h"
#include "checkpoint/inspect.h"
#include "multiprocess/launch_support.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"
#include "support/ask_python.h"
#include "support/ranks.h"
#include "support/sanitized.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using Words = std::vector<std::string>;

class CheckpointCommand : public ::testing::Test {
 protected:
  void SetUp() override { fs::create_directory(folder_); }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }

  using Said = checkpoint::Answer;
  // As the command does it, but here: each start of the program loads libtorch.
  static Said run(const Words& words) {
    std::string prefix, force = "0", tolerance = "0";
    Words paths;
    for (size_t i = 1; i < words.size(); ++i) {
      if (words[i] == "--prefix")
        prefix = words[++i];
      else if (words[i] == "--tolerance")
        tolerance = words[++i];
      else if (words[i] == "--force")
        force = "1";
      else
        paths.push_back(words[i]);
    }
    Words passed{words[0]};
    if (words[0] == "diff") passed.push_back(tolerance);
    if (words[0] == "convert") {
      passed.insert(passed.end(), {prefix, force, paths.back()});
      paths.pop_back();
    }
    passed.insert(passed.end(), paths.begin(), paths.end());
    return checkpoint::answer(passed);
  }
  static Said run_command(Words words) {
    words.insert(words.begin(), {kMusterCommand, "checkpoint"});
    Process process(words);
    const int status = process.finish();
    return {status, process.out, process.err};
  }
  // The command says the same as run(), which it returns.
  static Said run_both(const Words& words) {
    const Said here = run(words);
    if (kSanitized) return here;  // the sanitizers' trees have no command
    const Said there = run_command(words);
    EXPECT_EQ(there.status, here.status);
    EXPECT_EQ(there.out, here.out);
    EXPECT_EQ(there.err, here.err);
    return here;
  }

  // What Python writes, and says of what was written for it; asked once.
  static void SetUpTestSuite() {
    if (!python_has("torch")) return;
    fs::create_directory(for_python_);
    const std::string folder = for_python_.string() + "/";
    save_safetensors(folder + "newer.safetensors", {{"u16", torch::tensor({7, 65535}).to(torch::kUInt16)},
                                                    {"u64", torch::tensor({int64_t{1} << 40}).to(torch::kUInt64)},
                                                    {"f8", torch::tensor({-0.5F, 2.0F}).to(torch::kFloat8_e4m3fn)},
                                                    {"empty", torch::ones({0, 3}).to(torch::kUInt16)}});
    EXPECT_EQ(run({"convert", folder + "newer.safetensors", folder + "newer.pt"}).status, 0);
    save(folder + "one", true);
    const Said to = run({"convert", "--prefix", "model/", folder + "one", folder + "model.pt"});
    EXPECT_EQ(to.status, 0) << to.err;
    answers_ =
        ask_python("multiprocess/checkpoint_reference.py", {"state " + folder, "newer " + folder, "odd " + folder});
  }
  static void TearDownTestSuite() {
    fs::remove_all(for_python_);
    answers_.clear();
  }
  void take_files_of_python() const {
    fs::copy(for_python_, folder_, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
  }

  // Snapshots of steps 1 and 2; the values depend on the seed.
  void save_here(const std::string& name, bool sharded, uint64_t seed = 5) const { save(path(name), sharded, seed); }
  static void save(const std::string& folder, bool sharded, uint64_t seed = 5) {
    run_threads(2, [&](World&) {
      torch::nn::Linear net(3, 4);
      {
        const torch::NoGradGuard no_grad;
        for (torch::Tensor& parameter : net->parameters()) parameter.fill_(0.1 * static_cast<double>(seed));
      }
      torch::optim::Adam adam(net->parameters());
      Snapshot snapshot({.folder = folder, .sharded = sharded, .on_sigterm = false, .default_generator = false});
      snapshot.add("model", net).add("adam", adam);
      EXPECT_EQ(snapshot.restore(), 0);
      for (const int64_t step : {1, 2}) {
        net->forward(torch::ones({2, 3})).sum().backward();
        adam.step();
        snapshot.save(step);
      }
    });
  }

 private:
  const fs::path folder_ = fs::temp_directory_path() / text("muster-checkpoint-command-", ::getpid());
  inline static const fs::path for_python_ =
      fs::temp_directory_path() / text("muster-checkpoint-command-python-", ::getpid());

 protected:
  inline static std::vector<std::vector<double>> answers_;
};

std::string bytes_in(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
void flip_last_byte(const std::string& path) {
  std::string bytes = bytes_in(path);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  std::ofstream(path, std::ios::binary) << bytes;
}

TEST_F(CheckpointCommand, ListsSnapshotsAndTensors) {
  for (const bool sharded : {false, true}) {
    const std::string name = sharded ? "sharded" : "one";
    save_here(name, sharded);
    const Said folder = run_both({"ls", path(name)});
    EXPECT_EQ(folder.status, 0) << folder.err;
    EXPECT_THAT(folder.out, AllOf(HasSubstr("step 2"), HasSubstr("step 1"), HasSubstr("2 ranks"),
                                  HasSubstr(sharded ? "3 files" : "1 file")));
    const Said file = run({"ls", path(name + "/step-2.snapshot.safetensors")});
    EXPECT_EQ(file.status, 0) << file.err;
    EXPECT_THAT(file.out, AllOf(HasSubstr("model/weight"), HasSubstr("Float"), HasSubstr("[4, 3]"), HasSubstr("48 B"),
                                HasSubstr("adam/state/1/exp_avg"), HasSubstr(" tensors, ")));
  }
}

TEST_F(CheckpointCommand, VerifiesEveryByte) {
  save_here("one", false);
  save_here("sharded", true);
  save_safetensors(path("plain.safetensors"), {{"x", torch::ones({3})}});
  const Said good = run_both({"verify", path("one"), path("sharded"), path("plain.safetensors")});
  EXPECT_EQ(good.status, 0) << good.out;
  EXPECT_THAT(good.out, AllOf(HasSubstr("one/step-2.snapshot.safetensors: good\n"),
                              HasSubstr("sharded/step-1.snapshot.safetensors: good, with 2 shards\n"),
                              HasSubstr("plain.safetensors: can be read; it has no checksums")));
  flip_last_byte(path("one/step-1.snapshot.safetensors"));
  for (const auto& entry : fs::directory_iterator(path("sharded")))
    if (entry.path().filename().string().starts_with("step-2.shard-1")) flip_last_byte(entry.path());
  const Said bad = run_both({"verify", path("one"), path("sharded")});
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.out, AllOf(HasSubstr("one/step-2.snapshot.safetensors: good\n"),
                             HasSubstr("one/step-1.snapshot.safetensors"), HasSubstr("byte"),
                             HasSubstr("step-2.shard-1"), HasSubstr("sharded/step-1.snapshot.safetensors: good")));
  fs::create_directory(path("empty"));
  const Said both = run_both({"verify", path("empty"), path("one"), path("nowhere")});
  EXPECT_EQ(both.status, 1);
  EXPECT_THAT(both.out, AllOf(HasSubstr("there are no snapshots in "),
                              HasSubstr("one/step-1.snapshot.safetensors, byte"), HasSubstr("nowhere")));
  fs::remove(path("one/step-2.snapshot.safetensors"));
  const Said missing = run({"verify", path("one/step-2.snapshot.safetensors")});
  EXPECT_EQ(missing.status, 1);
}

TEST_F(CheckpointCommand, SaysWhatDiffers) {
  save_here("one", false);
  save_here("same", true);
  save_here("other", false, 6);
  const Said same = run({"diff", path("one"), path("same")});
  EXPECT_EQ(same.status, 0) << same.out;
  EXPECT_THAT(same.out, HasSubstr(" tensors are equal\n"));
  const Said other = run({"diff", path("one"), path("other")});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.out, HasSubstr("model/weight: Float [4, 3], values differ by up to "));
  EXPECT_EQ(run_both({"diff", path("one"), path("other"), "--tolerance", "100"}).status, 0);
  const auto nan = torch::full({2}, NAN);
  save_safetensors(path("a.safetensors"), {{"x", torch::ones({3})}, {"y", torch::ones({2})}, {"z", nan}});
  save_safetensors(path("b.safetensors"),
                   {{"x", torch::ones({4})}, {"w", torch::ones({2})}, {"z", torch::tensor({NAN, 1.0F})}});
  const Said forms = run({"diff", path("a.safetensors"), path("b.safetensors"), "--tolerance", "1"});
  EXPECT_EQ(forms.status, 1);
  EXPECT_THAT(forms.out,
              AllOf(HasSubstr("x: Float [3] and Float [4]\n"), HasSubstr("y: only in " + path("a.safetensors")),
                    HasSubstr("w: only in " + path("b.safetensors")),
                    HasSubstr("z: Float [2], values differ by up to inf"), HasSubstr("0 tensors are equal, 4 differ")));
}

TEST_F(CheckpointCommand, ConvertsToAndFromPython) {
  save_here("one", true);
  const Said to = run_both({"convert", "--force", "--prefix", "model/", path("one"), path("model.pt")});
  EXPECT_EQ(to.status, 0) << to.err;
  EXPECT_EQ(run({"convert", path("model.pt"), path("again.safetensors")}).status, 0);
  EXPECT_EQ(run({"convert", "--prefix", "model/", path("one"), path("straight.safetensors")}).status, 0);
  const Said diff = run({"diff", path("again.safetensors"), path("straight.safetensors")});
  EXPECT_EQ(diff.status, 0) << diff.out;
  EXPECT_THAT(diff.out, HasSubstr("2 tensors are equal"));
  if (python_has("torch")) {
    // It has loaded what was converted, and written a state_dict, one with a view, and something that is none.
    take_files_of_python();
    ASSERT_EQ(answers_.size(), 2u);
    EXPECT_EQ(answers_[0], (std::vector<double>{4, 3, 4}));
    const Said from = run({"convert", path("python.pt"), path("more.pt"), path("python.safetensors")});
    EXPECT_EQ(from.status, 0) << from.err;
    const SafetensorsFile file(path("python.safetensors"));
    EXPECT_TRUE(torch::equal(file.tensor("0.weight"), torch::arange(6, torch::kFloat).view({2, 3})));
    EXPECT_TRUE(torch::equal(file.tensor("view"), torch::tensor({1.0F, 3.0F})));
    EXPECT_EQ(file.tensor("half").scalar_type(), torch::kBFloat16);
    EXPECT_EQ(file.tensor("nested.inner").item<int64_t>(), 7);
    EXPECT_TRUE(torch::equal(file.tensor("again"), file.tensor("view")));
    EXPECT_EQ(file.tensor("scalar").dim(), 0);
    EXPECT_EQ(file.tensor("empty").sizes(), (std::vector<int64_t>{0, 3}));
    EXPECT_TRUE(torch::equal(file.tensor("complex"), torch::complex(torch::ones({2}), -torch::ones({2}))));
    EXPECT_TRUE(torch::equal(file.tensor("parameter"), torch::full({2}, 5.0F)));
    const Said code = run({"convert", path("code.pt"), path("no.safetensors")});
    EXPECT_EQ(code.status, 2);
    EXPECT_THAT(code.err, HasSubstr("code.pt calls posix.getcwd, which is not read here"));
    const Said no = run({"convert", path("text.pt"), path("no.safetensors")});
    EXPECT_EQ(no.status, 2);
    EXPECT_THAT(no.err, AllOf(HasSubstr("text.pt holds a string under epoch"), HasSubstr("state_dict")));
    EXPECT_FALSE(fs::exists(path("no.safetensors")));
  }
  std::ofstream(path("bad.pt")) << "no pickle";
  EXPECT_THAT(run({"convert", path("bad.pt"), path("no.safetensors")}).err, HasSubstr("is not a file of torch.save()"));
  const Said exists = run({"convert", path("model.pt"), path("again.safetensors")});
  EXPECT_EQ(exists.status, 2);
  EXPECT_THAT(exists.err, HasSubstr("exists already"));
  EXPECT_EQ(run({"convert", "--force", path("model.pt"), path("again.safetensors")}).status, 0);
  EXPECT_THAT(run({"convert", path("model.pt"), path("again.safetensors"), path("two.safetensors")}).err,
              HasSubstr("two of the sources have a tensor 'bias'"));
  EXPECT_THAT(run({"convert", "--prefix", "nothing", path("one"), path("no.pt")}).err,
              HasSubstr("begins with 'nothing'"));
}

TEST_F(CheckpointCommand, NewerDtypesComeAndGo) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch";
  take_files_of_python();
  ASSERT_EQ(answers_.size(), 2u);
  EXPECT_EQ(answers_[1], (std::vector<double>{7, 65535, static_cast<double>(int64_t{1} << 40), -0.5, 2, 0, 3}));
  EXPECT_EQ(run({"diff", path("newer.pt"), path("newer.safetensors")}).status, 0);
  const Said from = run({"convert", path("newer-too.pt"), path("newer-too.safetensors")});
  EXPECT_EQ(from.status, 0) << from.err;
  const SafetensorsFile file(path("newer-too.safetensors"));
  EXPECT_TRUE(torch::equal(file.tensor("u32").to(torch::kLong), torch::tensor({int64_t{7}, int64_t{1} << 31})));
  EXPECT_EQ(file.tensor("f8").to(torch::kFloat).item<float>(), 0.5F);
}

TEST_F(CheckpointCommand, ReadsOddFilesOfPythonOrSaysWhyNot) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch";
  take_files_of_python();
  const Said good = run({"convert", path("conj.pt"), path("neg.pt"), path("notes.pt"), path("good.safetensors")});
  ASSERT_EQ(good.status, 0) << good.err;
  const SafetensorsFile file(path("good.safetensors"));
  const auto parts = [&](const std::string& name) { return torch::view_as_real(file.tensor(name)); };
  EXPECT_TRUE(torch::equal(parts("conj"), torch::tensor({1.0F, -2.0F, 3.0F, -4.0F}).view({2, 2})));
  EXPECT_TRUE(torch::equal(file.tensor("neg"), torch::tensor({-2.0F, -4.0F})));
  EXPECT_TRUE(torch::equal(file.tensor("parameter"), torch::ones({2})));
  EXPECT_TRUE(torch::equal(file.tensor("tensor"), torch::full({2}, 2.0F)));
  EXPECT_TRUE(torch::equal(file.tensor("buffer"), torch::full({2}, 3.0F)));
  ASSERT_EQ(run({"convert", path("conj.pt"), path("resolved.pt")}).status, 0);
  EXPECT_EQ(run({"diff", path("resolved.pt"), path("conj.pt")}).status, 0);
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"names", "two tensors of " + path("names.pt") + " would be named 'a.b'"},
      {"wide", "has tensors that repeat their elements, such as 'wide'"},
      {"big", ": expected numbers of the byte order 'little', got 'big'"},
      {"compressed", "has a compressed record"},
      {"bomb", "has a compressed record"},
      {"overlapping", "has records of more bytes than the file"},
      {"cut", "is not a file of torch.save(): PytorchStreamReader failed reading zip archive"},
      {"legacy", "is not a file of torch.save() of PyTorch 1.6 or later"},
      {"protocol-0", ": expected a pickle of protocol 2 to 5, got 0 or 1"},
      {"bytes", "holds bytes, and not only tensors"},
      {"module", "holds an object of torch.nn.modules.linear.Linear, and not only tensors"},
      {"missing", "missing.pt does not exist"}};
  for (const auto& [name, words] : cases) {
    const Said said = run({"convert", path(name + ".pt"), path("no.safetensors")});
    EXPECT_NE(said.status, 0) << name;
    EXPECT_THAT(said.err, HasSubstr(words));
    EXPECT_LT(said.err.size(), 400u) << said.err;
    EXPECT_FALSE(fs::exists(path("no.safetensors")));
  }
  // The other commands know such files, too.
  EXPECT_THAT(run({"ls", path("plain.pt")}).out, HasSubstr("a  Float  [1000]  4.0 kB\n1 tensor, 4.0 kB\n"));
  const Said verified = run({"verify", path("plain.pt"), path("cut.pt")});
  EXPECT_EQ(verified.status, 1);
  EXPECT_THAT(verified.out, AllOf(HasSubstr("plain.pt: can be read; it has no checksums\n"),
                                  HasSubstr("cut.pt is not a file of torch.save()")));
  EXPECT_THAT(run({"diff", path("plain.pt"), path("two.pt")}).out, HasSubstr("b: only in " + path("two.pt")));
}

void write_header(const std::string& path, const std::string& header) {
  const uint64_t length = header.size();
  std::ofstream(path, std::ios::binary) << std::string(reinterpret_cast<const char*>(&length), sizeof length) << header;
}
// A safetensors file of one tensor.
void write_one(const std::string& path, const std::string& dtype, int64_t count, const std::string& bytes) {
  write_header(
      path, text(R"({"w":{"dtype":")", dtype, R"(","shape":[)", count, R"(],"data_offsets":[0,)", bytes.size(), "]}}"));
  std::ofstream(path, std::ios::binary | std::ios::app) << bytes;
}

TEST_F(CheckpointCommand, ListsHeadersOnly) {
  write_one(path("f4.safetensors"), "F4", 16, std::string(8, 1));
  const Said listed = run({"ls", path("f4.safetensors")});
  EXPECT_EQ(listed.status, 0) << listed.err;
  EXPECT_EQ(listed.out, "w  F4  [16]  8 B\n1 tensor, 8 B\n");
  EXPECT_THAT(run({"diff", path("f4.safetensors"), path("f4.safetensors")}).err,
              HasSubstr("tensor 'w' of " + path("f4.safetensors") + " is of dtype F4, which libtorch lacks"));
  // Not even the values of a snapshot: those of this one are damaged. (Shard 1 has none.)
  for (const bool sharded : {false, true}) {
    const std::string name = sharded ? "sharded" : "one";
    save_here(name, sharded);
    std::string values;
    for (const auto& entry : fs::directory_iterator(path(name)))
      if (entry.path().filename().string().starts_with(sharded ? "step-2.shard-0" : "step-2.snapshot"))
        values = entry.path().string();
    flip_last_byte(values);
    const std::string file = path(name + "/step-2.snapshot.safetensors");
    EXPECT_EQ(run({"verify", file}).status, 1);
    const Said snapshot = run({"ls", file});
    EXPECT_EQ(snapshot.status, 0) << snapshot.err;
    fs::resize_file(values, fs::file_size(values) - 8);
    const Said cut = run({"ls", file});
    EXPECT_EQ(cut.status, 1);
    EXPECT_THAT(cut.err, HasSubstr(sharded ? "the file ends here, within tensor 'adam/state/" : "does not lie where"));
  }
  // Without this it would wait for a writer.
  ASSERT_EQ(::mkfifo(path("pipe.pt").c_str(), 0600), 0);
  for (const Words& words : {Words{"ls", path("pipe.pt")}, Words{"convert", path("pipe.pt"), path("no.safetensors")}})
    EXPECT_THAT(run(words).err, HasSubstr("it is not a regular file"));
}

TEST_F(CheckpointCommand, DifferencesAreExact) {
  const auto bytes = [](auto... values) {
    const auto one = [](auto value) { return std::string(reinterpret_cast<const char*>(&value), sizeof value); };
    return (one(values) + ...);
  };
  struct Case {
    std::string dtype;
    int64_t count;
    std::string a, b, words;  // no words: they are equal within 0.5
  };
  const uint64_t large = (uint64_t{1} << 63) + 1;
  const float nan = NAN;
  for (const auto& [dtype, count, a, b, words] : std::vector<Case>{
           {"I64", 1, bytes(int64_t{1} << 53), bytes((int64_t{1} << 53) + 1), "differ by up to 1\n"},
           {"I64", 2, bytes(INT64_MIN, int64_t{0}), bytes(INT64_MAX, int64_t{0}), "differ by up to 1.84467e+19\n"},
           {"U64", 1, bytes(large), bytes(large - 1), "differ by up to 1\n"},
           {"U8", 1, bytes(uint8_t{3}), bytes(uint8_t{5}), "differ by up to 2\n"},
           {"C64", 1, bytes(nan, 1.0F), bytes(nan, 5.0F), "differ by up to 4\n"},
           {"C64", 1, bytes(nan, 1.0F), bytes(1.0F, 1.0F), "differ by up to inf\n"},
           {"C64", 1, bytes(nan, 1.0F), bytes(nan, 1.25F), ""}}) {
    SCOPED_TRACE(dtype + words);
    write_one(path("a.safetensors"), dtype, count, a);
    write_one(path("b.safetensors"), dtype, count, b);
    const Said said = run({"diff", path("a.safetensors"), path("b.safetensors"), "--tolerance", "0.5"});
    EXPECT_EQ(said.status, words.empty() ? 0 : 1);
    EXPECT_THAT(said.out, HasSubstr(words.empty() ? "1 tensor is equal" : words));
  }
}

TEST_F(CheckpointCommand, EntriesOfOneNameAreNumbered) {
  checkpoint::Entries entries;
  for (int i = 0; i < 3; ++i)
    entries.push_back({.item = "model", .name = "w", .kind = "tensor", .order = i, .tensor = torch::full({1}, i)});
  checkpoint::write_container(path("a.safetensors"), {.steps = 1}, entries);
  EXPECT_EQ(run({"ls", path("a.safetensors")}).out,
            "model/w             Long  [1]  8 B\n"
            "model/w (tensor 2)  Long  [1]  8 B\n"
            "model/w (tensor)    Long  [1]  8 B\n"
            "3 tensors, 24 B\n");
  entries[2].tensor = torch::full({1}, 7);
  checkpoint::write_container(path("b.safetensors"), {.steps = 1}, entries);
  EXPECT_THAT(run({"diff", path("a.safetensors"), path("b.safetensors")}).out, HasSubstr("model/w (tensor 2): Long"));
}

// Files of 8 TiB, almost all of them a hole.
TEST_F(CheckpointCommand, MemoryMayNotSuffice) {
  const uint64_t large = uint64_t{1} << 43;
  const auto write_large = [&](const std::string& file, const std::string& metadata, char first) {
    const std::string header =
        text("{", metadata, R"("w":{"dtype":"U8","shape":[)", large, R"(],"data_offsets":[0,)", large, "]}}");
    write_header(file, header);
    std::ofstream(file, std::ios::binary | std::ios::app) << first;
    fs::resize_file(file, sizeof(uint64_t) + header.size() + large);
  };
  write_large(path("a.safetensors"), "", 0);
  write_large(path("b.safetensors"), "", 1);
  if (!kSanitized) {  // AddressSanitizer gives as much address space as is asked for, and then checks all of it
    EXPECT_EQ(run({"diff", path("a.safetensors"), path("b.safetensors")}).err, "muster: not enough memory\n");
  }
  // It claims to be a snapshot, whose header has a checksum. That is refused without its tensors.
  write_large(path("c.safetensors"), R"("__metadata__":{"muster":"{}"},)", 0);
  const Said said = run({"verify", path("c.safetensors")});
  EXPECT_EQ(said.status, 1);
  if (kSanitizesThreads) {  // has less address space
    EXPECT_EQ(said.out, "cannot map " + path("c.safetensors") + ": Cannot allocate memory\n");
  } else {
    EXPECT_EQ(said.out, path("c.safetensors") + ", byte 8: this is not a snapshot\n");
  }
}

TEST_F(CheckpointCommand, SaysWhatIsWrongWithItsArguments) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers' trees have no command";
  fs::create_directory(path("empty"));
  const std::vector<std::pair<Words, std::string>> cases = {
      {{}, "has no command ''"},
      {{"lss"}, "has no command 'lss'"},
      {{"ls"}, "ls needs one path"},
      {{"diff", "a"}, "diff needs two paths"},
      {{"diff", "a", "b", "--tolerance", "x"}, "--tolerance of 0"},
      {{"convert", "a"}, "a source and a target"},
      {{"verify"}, "verify needs a path"},
      {{"ls", path("empty")}, "there are no snapshots in"}};
  for (const auto& [words, expected] : cases) {
    const Said said = run_command(words);
    EXPECT_EQ(said.status, 2) << expected;
    EXPECT_THAT(said.err, HasSubstr(expected));
  }
  const Said missing = run_both({"ls", path("missing")});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("does not exist"));
}

}  // namespace
}  // namespace muster::test
