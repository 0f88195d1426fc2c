#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "checkpoint/torch_pickle.h"
#include "fuzz/parser_fuzz.h"
#include "fuzz/pickles.h"
#include "muster/base/error.h"
#include "support/ranks.h"

namespace muster::test {

INSTANTIATE_TEST_SUITE_P(Torch, ParserFuzz, testing::ValuesIn(torch_parsers()), name_of_parser);

namespace {

// Of a pickle's values without its first and last instruction. Storage 0 has the floats 0 to 15, storage 1 eight bytes
// of ones.
std::map<std::string, at::Tensor> tensors_of(const std::string& values) {
  return checkpoint::tensors_in_pickle("\x80\x02" + values + ".", "file", [](const std::string& key) {
    if (key == "1") return std::optional(at::tensor({1, 1, 1, 1, 1, 1, 1, 1}).to(at::kByte));
    return key == "0" ? std::optional(at::arange(16, at::kFloat).view(at::kByte)) : std::nullopt;
  });
}
template <typename Kind>
std::string refusal_of(const std::string& values) {
  return message_of<Kind>([&] { tensors_of(values); });
}
std::string dictionary(const std::vector<std::pair<std::string, std::string>>& items) {
  std::string all = "}(";
  for (const auto& [key, value] : items) all += pickled_string(key) + value;
  return all + "u";
}
std::string index(uint32_t number) { return {reinterpret_cast<const char*>(&number), sizeof number}; }

TEST(TorchParser, SetsTheBitsOfTensors) {
  const auto with = [](const std::string& kind, const std::string& bits, const std::string& value) {
    return PickledTensor{.kind = "torch\n" + kind,
                         .elements = kind == "FloatStorage" ? 16 : 8,
                         .shape = "K\x02\x85",
                         .strides = "K\x01\x85",
                         .more = "}" + pickled_string(bits) + value + "s"}
        .str();
  };
  const auto conjugated = tensors_of(with("ComplexFloatStorage", "conj", "\x88")).at("tensor");
  EXPECT_TRUE(
      at::equal(at::view_as_real(conjugated.resolve_conj()), at::tensor({0.0F, -1.0F, 2.0F, -3.0F}).view({2, 2})));
  const auto negated = tensors_of(with("FloatStorage", "neg", "\x88")).at("tensor");
  EXPECT_TRUE(at::equal(negated.resolve_neg(), at::tensor({0.0F, -1.0F})));
  EXPECT_TRUE(at::equal(tensors_of(with("FloatStorage", "neg", "\x89")).at("tensor"), at::tensor({0.0F, 1.0F})));
  EXPECT_CONTAINS(refusal_of<CorruptError>(with("FloatStorage", "conj", "\x88")), "real numbers is conjugated");
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(with("FloatStorage", "zero", "\x88")), "has a tensor with 'zero'");
}

TEST(TorchParser, NoTensorIsLostByItsName) {
  const std::string one = PickledTensor{.key = "1", .elements = 2, .shape = "K\x01\x85", .strides = "K\x01\x85"}.str();
  const std::string matrix = PickledTensor().str();
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(dictionary({{"a.b", one}, {"a", dictionary({{"b", matrix}})}})),
                  "two tensors of file would be named 'a.b'");
  const auto empty = tensors_of(dictionary({{"", one}, {"tensor", matrix}}));
  EXPECT_EQ(empty.at("").numel(), 1);
  EXPECT_EQ(empty.at("tensor").numel(), 6);
  EXPECT_TRUE(tensors_of(dictionary({{"", dictionary({{"x", one}})}, {"x", one}})).contains(".x"));
  // The last of two equal keys, as Python has it.
  const auto last =
      tensors_of(dictionary({{"a", "K\x05"}, {"a", one}, {"b", dictionary({{"x", one}})}, {"b", matrix}}));
  EXPECT_EQ(last.size(), 2u);
  EXPECT_EQ(last.at("b").numel(), 6);
  // Long names are cut in messages, between characters.
  const std::string what = refusal_of<InvalidArgument>(dictionary({{std::string(99, 'n') + "\u00b5\u00b5", "N"}}));
  EXPECT_CONTAINS(what, std::string(99, 'n') + "...,");
  EXPECT_LT(refusal_of<InvalidArgument>("c" + std::string(100'000, 'm') + "\nf\n)R").size(), 400u);
  EXPECT_CONTAINS(refusal_of<CorruptError>(dictionary({{"\xff\xfe", one}})), "a string is not UTF-8");
  EXPECT_CONTAINS(refusal_of<CorruptError>(dictionary({{"\xed\xa0\x80", one}})), "a string is not UTF-8");
}

// What would take hours or all memory if each value were followed or copied wherever it is used.
TEST(TorchParser, AForgedPickleCostsLittle) {
  std::string nested = "}q" + std::string(1, 0);
  for (char level = 0; level < 60; ++level)
    nested += "}(" + pickled_string("") + "h" + level + pickled_string("b") + "h" + level + "uq" +
              static_cast<char>(level + 1);
  refusal_of<CorruptError>(nested);
  std::string recalls = "](" + pickled_string(std::string(1'000'000, 'x')) + "q" + std::string(1, 0);
  for (int i = 0; i < 200'000; ++i) recalls += std::string("h\0", 2);
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(recalls + "e"), "holds a list");
  // Lists that leave the stack immediately.
  std::string discarded = "}";
  for (int i = 0; i < 6'000'000; ++i) discarded += "]b";
  EXPECT_CONTAINS(refusal_of<CorruptError>(discarded), "it makes more than 10000000 values");
  std::string names = PickledTensor().str() + "q\x01}" + pickled_string(std::string(1'000'000, 'p')) + "}(";
  for (int i = 0; i < 3000; ++i) names += pickled_string(text(i)) + "h\x01";
  EXPECT_CONTAINS(refusal_of<CorruptError>(names + "us"), "has names of more than 268435456 bytes");
  std::string shapes = "(";
  for (int i = 0; i < 65; ++i) shapes += "K\x01";
  EXPECT_CONTAINS(refusal_of<CorruptError>(PickledTensor{.shape = shapes + "t"}.str()),
                  "a tensor has 65 dimensions, and up to 64 are read");
  // Numbers of kept values that fall onto each other in a table of 42043 places.
  std::string kept = "}N";
  for (uint32_t i = 0; i < 42'000; ++i) kept += "r" + index(i * 42'043);
  kept += "b}";
  for (int i = 0; i < 100'000; ++i) kept += "j" + index(0) + "b";
  EXPECT_TRUE(tensors_of(kept).empty());
}

TEST(TorchParser, RepeatedElementsAreBounded) {
  const auto repeated = [](uint32_t times) {
    return PickledTensor{.shape = "J" + index(times) + "\x85", .strides = std::string("K\0\x85", 3)}.str();
  };
  EXPECT_EQ(tensors_of(repeated(1U << 30)).at("tensor").numel(), 1 << 30);
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(dictionary({{"a", repeated(1U << 30)}, {"b", repeated(1U << 30)}})),
                  "has tensors that repeat their elements, such as 'b', of more than 4294967296 bytes");
  // Without elements nothing is repeated.
  const std::string empty = pickled_number(0) + pickled_number(int64_t{1} << 41) + "\x86";
  EXPECT_EQ(tensors_of(PickledTensor{.shape = empty}.str()).at("tensor").size(1), int64_t{1} << 41);
}

TEST(TorchParser, AStorageIsWhatThePickleSays) {
  const auto with = [](const PickledTensor& tensor) { return refusal_of<CorruptError>(tensor.str()); };
  EXPECT_CONTAINS(with({.id = "module"}), "it refers to something other than storages");
  EXPECT_CONTAINS(with({.elements = 15}), "storage 0 has 64 bytes, and should have 60");
  EXPECT_CONTAINS(with({.elements = -1}), "a storage has -1 elements");
  EXPECT_CONTAINS(with({.elements = int64_t{1} << 62}), "elements");
  EXPECT_CONTAINS(with({.key = "2"}), "there is no storage 2");
  const std::string longs =
      PickledTensor{.kind = "torch\nLongStorage", .elements = 8, .shape = "K\x01\x85", .strides = "K\x01\x85"}.str();
  EXPECT_CONTAINS(refusal_of<CorruptError>(dictionary({{"a", PickledTensor().str()}, {"b", longs}})),
                  "storage 0 has two dtypes");
}

TEST(TorchParser, ReadsWhatNewerDtypesAndAttributesNeed) {
  PickledTensor newer{.kind = "torch.storage\nUntypedStorage",
                      .elements = 64,
                      .more = "ctorch\nuint16\n",
                      .function = "_rebuild_tensor_v3"};
  EXPECT_EQ(tensors_of(newer.str()).at("tensor").scalar_type(), at::kUInt16);
  newer.more = "ctorch\nquint8\n";
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(newer.str()),
                  "has a tensor of dtype torch.quint8, which is not known here");
  newer.function = "_rebuild_tensor_v2";
  newer.more = "";
  EXPECT_CONTAINS(refusal_of<CorruptError>(newer.str()), "a tensor has no dtype");
  const std::string matrix = PickledTensor().str();
  EXPECT_EQ(tensors_of("ctorch._utils\n_rebuild_parameter_with_state\n(" + matrix + "\x88N}tR").at("tensor").numel(),
            6);
  const auto of_class = [&](const std::string& type) {
    std::string arguments = matrix.substr(matrix.find('('));
    arguments.pop_back();
    return "ctorch._tensor\n_rebuild_from_type_v2\n(ctorch._utils\n_rebuild_tensor_v2\nc" + type + "\n" + arguments +
           "}tR";
  };
  EXPECT_EQ(tensors_of(of_class("torch.nn.parameter\nBuffer")).at("tensor").numel(), 6);
  EXPECT_CONTAINS(refusal_of<InvalidArgument>(of_class("mine\nQuantized")), "has a tensor of class mine.Quantized");
}

TEST(TorchParser, SaysWhatItDoesNotRead) {
  for (const auto& [values, words] : std::vector<std::pair<std::string, std::string>>{
           {std::string("B\1\0\0\0x", 6), "file holds bytes, and not only tensors"},
           {std::string("C\1x", 3), "file holds bytes"},
           {std::string("U\1x", 3), "file holds a string of Python 2"},
           {"\x8f", "file holds a set"},
           {"\x8a\x09" + std::string(9, 1), "file holds an integer of 9 bytes"},
           {"cmine\nNet\n)\x81", "file holds an object of mine.Net"},
           {"I1\n", "file: expected a pickle of protocol 2 to 5, got 0 or 1"},
           {"cos\nsystem\n)R", "file calls os.system, which is not read here"},
           {"]", "file holds a list, and not only tensors"}})
    EXPECT_CONTAINS(refusal_of<InvalidArgument>(values), words);
  EXPECT_CONTAINS(refusal_of<CorruptError>("\x80\x07"), "its protocol is 7, and 2 to 5 are read");
  EXPECT_CONTAINS(refusal_of<CorruptError>("\xfe"), "it has the instruction 254, which makes no data");
}

TEST(TorchParser, ReadsWhatItWrites) {
  std::map<std::string, at::Tensor> tensors, storages;
  for (const auto dtype : {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort,
                           at::kChar, at::kByte, at::kBool, at::kComplexFloat, at::kComplexDouble, at::kUInt16,
                           at::kUInt64, at::kFloat8_e4m3fn, at::kFloat8_e8m0fnu})
    tensors[c10::toString(dtype)] = at::arange(6, at::kFloat).view({2, 3}).to(dtype);
  tensors["scalar"] = at::tensor(2.5);
  tensors["empty \u00b5"] = at::empty({3, 0, 2});
  for (const auto& [name, tensor] : tensors) storages[text(storages.size())] = tensor.reshape({-1}).view(at::kByte);
  const auto read = checkpoint::tensors_in_pickle(
      checkpoint::pickle_of(tensors), "file", [&](const std::string& key) { return std::optional(storages.at(key)); });
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(read.at(name).sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(at::equal(read.at(name).contiguous().view(at::kByte), tensor.view(at::kByte)) || tensor.dim() == 0)
        << name;
  }
  EXPECT_EQ(read.at("scalar").item<float>(), 2.5F);
  tensors = {{"b", at::empty({1}, at::ScalarType::Bits8)}};
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { checkpoint::pickle_of(tensors); }), "tensor 'b' is of dtype Bits8");
}

}  // namespace
}  // namespace muster::test
