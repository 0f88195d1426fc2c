// Safetensors files: what is written is read back, by Python too, and anything else is refused.
#include <ATen/ops/arange.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <torch/nn.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/text.h"
#include "muster/muster.h"
#include "support/ask_python.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

namespace fs = std::filesystem;

class Safetensors : public testing::Test {
 protected:
  Safetensors() {
    std::string pattern = (fs::temp_directory_path() / "safetensors-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
    path_ = folder_ / "a.safetensors";
  }
  ~Safetensors() override { fs::remove_all(folder_); }

  void write(const std::string& header, size_t data_bytes) const {
    const uint64_t length = header.size();
    std::ofstream(path_, std::ios::binary)
        << std::string(reinterpret_cast<const char*>(&length), sizeof length) << header << std::string(data_bytes, 0);
  }
  std::string refusal() const {
    return message_of<CorruptError>([&] { SafetensorsFile file(path_); });
  }

  fs::path folder_, path_;
};

struct Small : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(3, 4));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(4));
};

TEST_F(Safetensors, BringsBackTensorsAndMetadata) {
  const std::map<std::string, at::Tensor> tensors{{"a", at::rand({3, 2})},
                                                  {"b", at::arange(3, at::kByte)},
                                                  {"c", at::rand({5}).to(at::kBFloat16)},
                                                  {"d", at::arange(6, at::kLong).reshape({2, 3}).t()},
                                                  {"e", at::rand({0, 4})},
                                                  {"f", at::tensor({1, 0}).to(at::kBool)},
                                                  {"g", at::rand({})}};
  save_safetensors(path_, tensors, {{"epoch", "3"}});
  SafetensorsFile file(path_);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"epoch", "3"}}));
  EXPECT_EQ(file.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    const at::Tensor got = file.tensor(name);
    EXPECT_EQ(got.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(at::equal(got, tensor)) << name;
    EXPECT_TRUE(file.contains(name));
  }
  EXPECT_FALSE(file.contains("h"));
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { file.tensor("h"); }), "has no tensor 'h'");
  // A view of the file, which outlives the object, and whose changes stay here.
  const at::Tensor a = file.tensor("a");
  EXPECT_FALSE(a.is_alias_of(file.tensor("g")));  // they have versions of their own
  EXPECT_EQ(a.const_data_ptr(), file.tensor("a").const_data_ptr());
  a.fill_(1);
  file = SafetensorsFile(path_);
  EXPECT_TRUE(at::equal(file.tensor("a"), tensors.at("a")));
  EXPECT_EQ(a.sum().item<float>(), 6);

  save_safetensors(path_, std::map<std::string, at::Tensor>{});
  EXPECT_TRUE(SafetensorsFile(path_).names().empty());
}

TEST_F(Safetensors, PythonReadsAndWritesThem) {
  const bool has_library = python_has("safetensors");
  const fs::path theirs = folder_ / "theirs.safetensors", library = theirs.string() + ".library";
  save_safetensors(path_, {{"a", at::tensor({0.5F, -1.25F})}, {"b", at::tensor({int64_t{1} << 40})}}, {{"by", "C++"}});
  const auto answers = ask_python("unit/snapshot_reference.py", {"read " + path_.string(), "write " + theirs.string()});
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0], (std::vector<double>{0.5, -1.25, static_cast<double>(int64_t{1} << 40)}));

  const SafetensorsFile file(theirs);
  EXPECT_EQ(file.metadata().at("by"), "python");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b", "c"}));
  EXPECT_EQ(file.tensor("a").item<int64_t>(), 7);
  EXPECT_TRUE(at::equal(file.tensor("b"), at::tensor({0.5, -3.0}).to(at::kBFloat16)));  // not aligned
  EXPECT_TRUE(at::equal(file.tensor("c"), at::tensor({0.25F, 4.0F}).reshape({1, 2})));
  ASSERT_EQ(fs::exists(library), has_library);
  if (!has_library) return;
  torch::nn::Linear linear(2, 3);
  SafetensorsFile(library).load_into(*linear);
  EXPECT_TRUE(at::equal(linear->weight, at::full({3, 2}, 2.0F)));
  EXPECT_TRUE(at::equal(linear->bias, at::tensor({0.0F, 1.0F, 2.0F})));
}

TEST_F(Safetensors, AModuleOfTheSameNamesIsFilled) {
  const auto net = std::make_shared<Small>(), other = std::make_shared<Small>();
  net->norm->running_mean.fill_(3);
  const auto expect_same = [&] {
    for (const auto& each : net->named_parameters())
      EXPECT_TRUE(at::equal(each.value(), other->named_parameters()[each.key()])) << each.key();
    for (const auto& each : net->named_buffers())
      EXPECT_TRUE(at::equal(each.value(), other->named_buffers()[each.key()])) << each.key();
  };
  save_safetensors(path_, *net);
  const SafetensorsFile file(path_);
  const at::Tensor weight = other->a->weight;
  file.load_into(*other);
  expect_same();
  EXPECT_TRUE(weight.is_same(other->a->weight) && weight.requires_grad());

  // An item of a snapshot; and what a module or a file has besides.
  run_threads(1, [&](World&) {
    Snapshot snapshot({.folder = folder_ / "run"});
    snapshot.add("model", *net).save(5);
  });
  const SafetensorsFile of_snapshot(folder_ / "run/step-5.snapshot.safetensors");
  other->a->weight.data().zero_();
  of_snapshot.load_into(*other, {.prefix = "model/"});
  expect_same();
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { of_snapshot.load_into(*other); }),
                  "lacks a.bias, a.weight, norm.bias, norm.num_batches_tracked");

  const std::map<std::string, at::Tensor> part{{"a.weight", at::full({4, 3}, 2.0)}, {"b", at::rand({2})}};
  save_safetensors(path_, part);
  const std::string what = message_of<InvalidArgument>([&] { SafetensorsFile(path_).load_into(*other); });
  EXPECT_CONTAINS(what, "lacks a.bias, norm.bias");
  EXPECT_CONTAINS(what, "it has, and the module has not, b.");
  expect_same();
  SafetensorsFile(path_).load_into(*other, {.strict = false});
  EXPECT_EQ(other->a->weight.sum().item<float>(), 24);  // doubles became floats
  EXPECT_TRUE(at::equal(other->a->bias, net->a->bias));

  save_safetensors(path_, std::map<std::string, at::Tensor>{{"a.weight", at::rand({3, 4})}});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { SafetensorsFile(path_).load_into(*other, {.strict = false}); }),
                  "does not fit: a.weight [3 x 4] for [4 x 3]");
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { file.load_into(*other, {.prefix = "x/", .strict = false}); }),
                  "has none of the module's tensors");
  const auto without_memory = on_meta([] { return std::make_shared<Small>(); });
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { file.load_into(*without_memory); }), "FsdpOptions::init");
}

// A module that has a tensor under two names; the file has it once, and not aligned.
TEST_F(Safetensors, TiedWeightsNeedOneName) {
  struct Tied : torch::nn::Module {
    torch::Tensor a = register_parameter("a", torch::zeros({2, 1})), b = register_parameter("b", a);
  } tied;
  const std::string header = R"({"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                             R"("m.b":{"dtype":"F32","shape":[2,1],"data_offsets":[1,9]}})";
  write(header, 1);
  const float values[2] = {1, 2};
  std::ofstream(path_, std::ios::binary | std::ios::app).write(reinterpret_cast<const char*>(values), sizeof values);
  SafetensorsFile(path_).load_into(tied, {.prefix = "m."});
  EXPECT_TRUE(at::equal(tied.a, at::tensor({1.0F, 2.0F}).reshape({2, 1})));
}

TEST_F(Safetensors, WhatIsNoSuchFileIsRefused) {
  const std::string weight = R"("w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  write("{" + weight + "}", 8);
  EXPECT_EQ(SafetensorsFile(path_).tensor("w").sum().item<float>(), 0);
  write(R"({"__metadata__":null,"w":{"dtype":"F4","shape":[16],"data_offsets":[0,8]}})", 8);
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { SafetensorsFile(path_).tensor("w"); }),
                  "tensor 'w' of " + path_.string() + " is of dtype F4, which libtorch lacks");
  const auto form = SafetensorsFile(path_).form("w");
  EXPECT_EQ(form.dtype_in_file, "F4");
  EXPECT_EQ(form.dtype, at::ScalarType::Undefined);
  EXPECT_EQ(form.sizes, (std::vector<int64_t>{16}));
  EXPECT_EQ(form.bytes, 8u);
  struct Weight : torch::nn::Module {
    torch::Tensor w = register_parameter("w", torch::zeros({16}));
  } weight_only;
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { SafetensorsFile(path_).load_into(weight_only); }),
                  "does not fit: w of dtype F4, which libtorch lacks");
  for (const auto& [header, data_bytes, words] : std::vector<std::tuple<std::string, size_t, std::string>>{
           {"{" + weight + "}", 7, "does not lie where the other tensors and the file place it"},
           {"{" + weight + "}", 9, "1 bytes belong to no tensor"},
           {"{" + weight + R"(,"v":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12, "does not lie"},
           {"{" + weight + R"(,"v":{"dtype":"F32","shape":[3],"data_offsets":[8,16]}})", 16, "bytes of its shape"},
           {R"({"w":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "impossible shape"},
           {R"({"w":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "impossible shape"},
           {R"({"w":{"dtype":"F32","shape":{"0":2},"data_offsets":[0,8]}})", 8, "impossible shape"},
           {R"({"w":{"dtype":"F32","shape":null,"data_offsets":[0,4]}})", 4, "impossible shape"},
           {R"({")" + std::string(1000, 'n') + R"(":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8,
            std::string(100, 'n') + "...' does not have the bytes"},
           {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8,8]}})", 8, "impossible offsets"},
           {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8.0]}})", 8, "impossible offsets"},
           {" {" + weight + "}", 8, "not a JSON object"},
           {"{" + weight + "}" + std::string(1, 0) + "x", 8, "not a JSON object"},
           {R"({"w":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "impossible shape"},
           {R"({"w":{"dtype":"F32","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}})", 0, "impossible shape"},
           {R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "bytes of its shape"},
           {R"({"w":{"dtype":"F32","shape":[2]}})", 8, "lacks something"},
           {R"({"__metadata__":{"a":1}})", 0, "lacks something"},
           {R"([])", 0, "not a JSON object"},
           {"", 0, "not a JSON object"}}) {
    SCOPED_TRACE(header);
    write(header, data_bytes);
    EXPECT_CONTAINS(refusal(), path_.string() + ", byte ");
    EXPECT_CONTAINS(refusal(), words);
  }
  for (const size_t bytes : {0, 5, 30}) {
    write("{" + weight + "}", 8);
    fs::resize_file(path_, bytes);
    EXPECT_CONTAINS(refusal(), text("byte ", bytes, ": the file ends here"));
  }
  std::ofstream(path_, std::ios::binary) << std::string(100, '\xff');  // a header of 2^64 - 1 bytes
  EXPECT_CONTAINS(refusal(), "a header of 18446744073709551615 bytes is longer than any is");
  std::ofstream(path_, std::ios::binary) << std::string(7, 0) << '\x80' << std::string(100, '{');
  EXPECT_CONTAINS(refusal(), "a header of 9223372036854775808 bytes is longer than any is");
  EXPECT_CONTAINS(message_of<Unavailable>([&] { SafetensorsFile file(folder_ / "none"); }), "cannot read");
  ASSERT_EQ(::mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  EXPECT_CONTAINS(message_of<Unavailable>([&] { SafetensorsFile file(folder_ / "pipe"); }), "it is not a regular file");
}

TEST_F(Safetensors, WhatCannotBeStoredIsSaidByName) {
  const auto refused = [&](const std::string& name, const at::Tensor& tensor) {
    return message_of<InvalidArgument>([&] {
      save_safetensors(path_, std::map<std::string, at::Tensor>{{name, tensor}});
    });
  };
  EXPECT_CONTAINS(refused("c", at::rand({1}).to(at::kComplexDouble)), "tensor 'c' is of dtype ComplexDouble");
  EXPECT_CONTAINS(refused("u", at::Tensor()), "tensor 'u' is sparse, quantized or without data");
  EXPECT_CONTAINS(refused("s", at::rand({2, 2}).to_sparse()), "tensor 's' is sparse");
  EXPECT_CONTAINS(refused("\xff", at::rand({1})), "UTF-8");
  EXPECT_CONTAINS(refused("__metadata__", at::rand({1})), "must not be named");
  EXPECT_TRUE(fs::is_empty(folder_));
  EXPECT_CONTAINS(message_of<Unavailable>(
                      [&] { save_safetensors(folder_ / "none/a.safetensors", std::map<std::string, at::Tensor>{}); }),
                  "cannot write");
}

}  // namespace
}  // namespace muster::test
