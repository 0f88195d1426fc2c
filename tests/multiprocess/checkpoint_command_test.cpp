// muster checkpoint: ls, verify, diff and convert, on snapshots and other files.
#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "multiprocess/launch_support.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"
#include "support/ask_python.h"
#include "support/ranks.h"

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

  struct Said {
    int status;
    std::string out, err;
  };
  static Said run(Words words) {
    words.insert(words.begin(), {kMusterCommand, "checkpoint"});
    Process process(words);
    const int status = process.finish();
    return {status, process.out, process.err};
  }

  // Snapshots of steps 1 and 2; the values depend on the seed.
  void save(const std::string& name, bool sharded, uint64_t seed = 5) const {
    run_threads(2, [&](World&) {
      torch::nn::Linear net(3, 4);
      {
        const torch::NoGradGuard no_grad;
        for (torch::Tensor& parameter : net->parameters()) parameter.fill_(0.1 * static_cast<double>(seed));
      }
      torch::optim::Adam adam(net->parameters());
      Snapshot snapshot({.folder = path(name), .sharded = sharded, .on_sigterm = false, .default_generator = false});
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
    save(name, sharded);
    const Said folder = run({"ls", path(name)});
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
  save("one", false);
  save("sharded", true);
  save_safetensors(path("plain.safetensors"), {{"x", torch::ones({3})}});
  const Said good = run({"verify", path("one"), path("sharded"), path("plain.safetensors")});
  EXPECT_EQ(good.status, 0) << good.out;
  EXPECT_THAT(good.out, AllOf(HasSubstr("one/step-2.snapshot.safetensors: good\n"),
                              HasSubstr("sharded/step-1.snapshot.safetensors: good, with 2 shards\n"),
                              HasSubstr("plain.safetensors: can be read; it has no checksums")));
  flip_last_byte(path("one/step-1.snapshot.safetensors"));
  for (const auto& entry : fs::directory_iterator(path("sharded")))
    if (entry.path().filename().string().starts_with("step-2.shard-1")) flip_last_byte(entry.path());
  const Said bad = run({"verify", path("one"), path("sharded")});
  EXPECT_EQ(bad.status, 1);
  EXPECT_THAT(bad.out, AllOf(HasSubstr("one/step-2.snapshot.safetensors: good\n"),
                             HasSubstr("one/step-1.snapshot.safetensors"), HasSubstr("byte"),
                             HasSubstr("step-2.shard-1"), HasSubstr("sharded/step-1.snapshot.safetensors: good")));
  fs::remove(path("one/step-2.snapshot.safetensors"));
  const Said missing = run({"verify", path("one/step-2.snapshot.safetensors")});
  EXPECT_EQ(missing.status, 1);
}

TEST_F(CheckpointCommand, SaysWhatDiffers) {
  save("one", false);
  save("same", true);
  save("other", false, 6);
  const Said same = run({"diff", path("one"), path("same")});
  EXPECT_EQ(same.status, 0) << same.out;
  EXPECT_THAT(same.out, HasSubstr(" tensors are equal\n"));
  const Said other = run({"diff", path("one"), path("other")});
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(other.out, HasSubstr("model/weight: Float [4, 3], values differ by up to "));
  EXPECT_EQ(run({"diff", path("one"), path("other"), "--tolerance", "100"}).status, 0);
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
  save("one", true);
  const Said to = run({"convert", "--prefix", "model/", path("one"), path("model.pt")});
  EXPECT_EQ(to.status, 0) << to.err;
  EXPECT_EQ(run({"convert", path("model.pt"), path("again.safetensors")}).status, 0);
  EXPECT_EQ(run({"convert", "--prefix", "model/", path("one"), path("straight.safetensors")}).status, 0);
  const Said diff = run({"diff", path("again.safetensors"), path("straight.safetensors")});
  EXPECT_EQ(diff.status, 0) << diff.out;
  EXPECT_THAT(diff.out, HasSubstr("2 tensors are equal"));
  if (python_has("torch")) {
    // Loads what was converted, and writes a state_dict, one with a view, and something that is none.
    const auto answers = ask_python("multiprocess/checkpoint_reference.py", {path("")});
    ASSERT_EQ(answers.size(), 1u);
    EXPECT_EQ(answers[0], (std::vector<double>{4, 3, 4}));
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

TEST_F(CheckpointCommand, SaysWhatIsWrongWithItsArguments) {
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
    const Said said = run(words);
    EXPECT_EQ(said.status, 2) << expected;
    EXPECT_THAT(said.err, HasSubstr(expected));
  }
  const Said missing = run({"ls", path("missing")});
  EXPECT_EQ(missing.status, 1);
  EXPECT_THAT(missing.err, HasSubstr("does not exist"));
}

}  // namespace
}  // namespace muster::test
