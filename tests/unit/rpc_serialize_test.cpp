// Every type that may be sent, there and back; and bytes that are not what they should be.
#include "muster/rpc/serialize.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <cmath>
#include <complex>
#include <limits>
#include <random>

#include "muster/base/error.h"

namespace muster::rpc {
namespace {

enum class Color : int8_t { kRed = -3, kGreen = 7 };
enum Plain { kOne = 1, kMany = 1000 };

struct Inner {
  std::string name;
  std::optional<double> weight;
  Color color = Color::kRed;
  bool operator==(const Inner&) const = default;
  MSGPACK_DEFINE(name, weight, color);
};
struct Outer {
  std::vector<Inner> inner;
  std::map<std::string, at::Tensor> tensors;
  std::variant<int, std::string, Inner> choice;
  std::unique_ptr<Inner> maybe;
  MSGPACK_DEFINE(inner, tensors, choice, maybe);
};
struct ByName {
  int a = 0;
  at::Tensor b;
  MSGPACK_DEFINE_MAP(a, b);
};
struct Tree {
  int value = 0;
  std::vector<Tree> children;
  MSGPACK_DEFINE(value, children);
};
struct Opaque {
  int x;
};
struct NoDefault {
  explicit NoDefault(int x) : x(x) {}
  int x;
  MSGPACK_DEFINE(x);
};

static_assert(!Sendable<Opaque> && !Sendable<NoDefault> && !Sendable<int*> && !Sendable<std::vector<Opaque>>);
static_assert(!Sendable<std::string_view> && !Sendable<std::complex<Opaque>> && !Sendable<std::span<int>>);
static_assert(Sendable<Outer> && Sendable<Plain> && Sendable<std::vector<std::unique_ptr<Inner>>>);
static_assert(std::same_as<Held<std::span<const float>>, std::vector<float>>);
static_assert(std::same_as<Held<at::IntArrayRef>, std::vector<int64_t>> &&
              std::same_as<Held<const char (&)[3]>, std::string>);

template <typename T>
T back(T value) {
  Payload payload = pack(std::move(value));
  PayloadReader reader{payload.body, payload.tensors};
  return std::get<0>(unpack<T>(reader));
}
template <typename T>
void expect_back(T value) {
  EXPECT_EQ(back(value), value);
}

TEST(RpcSerialize, NumbersOfEverySizeKeepTheirLimits) {
  const auto both = []<typename T>(T) {
    expect_back(std::numeric_limits<T>::min());
    expect_back(std::numeric_limits<T>::max());
    expect_back(std::numeric_limits<T>::lowest());
    expect_back(T{0});
    expect_back(static_cast<T>(100));
  };
  both(int8_t{}), both(uint8_t{}), both(int16_t{}), both(uint16_t{}), both(int32_t{}), both(uint32_t{}),
      both(int64_t{});
  both(uint64_t{}), both(float{}), both(double{}), both((long double){}), both(char{}), both(bool{});
  both(wchar_t{}), both(char8_t{}), both(char16_t{}), both(char32_t{});
  for (int bits = 0; bits < 64; ++bits) {  // the limits of msgpack's sizes
    expect_back(uint64_t{1} << bits);
    expect_back((uint64_t{1} << bits) - 1);
    expect_back(-static_cast<int64_t>((uint64_t{1} << bits) - 1) - 1);
    expect_back(-static_cast<int64_t>((uint64_t{1} << bits) - 1));
  }
  EXPECT_TRUE(std::isnan(back(std::nan(""))));
  expect_back(std::numeric_limits<float>::infinity());
  expect_back(-0.0);
  expect_back(std::numeric_limits<long double>::infinity());
  expect_back(1.0L + std::numeric_limits<long double>::epsilon());
  expect_back(std::complex<double>(1, -2));
  expect_back(std::vector<std::complex<long double>>{{1, 2}, {3, 4}});
  expect_back(std::vector<char32_t>{U'ä', U'\U0001F40D'});
  // A byte string of another length, and a number that is not such a character.
  for (const bool is_long : {false, true}) {
    Payload payload = is_long ? pack(std::vector<std::byte>(8)) : pack(0x10000);
    PayloadReader reader{payload.body, payload.tensors};
    if (is_long)
      EXPECT_THROW(unpack<long double>(reader), CorruptError);
    else
      EXPECT_THROW(unpack<char16_t>(reader), CorruptError);
  }
}

TEST(RpcSerialize, ContainersAndChoices) {
  expect_back(std::string());
  for (const size_t size : {31, 32, 255, 256, 65'535, 65'536}) expect_back(std::string(size, 'x'));
  expect_back(std::string("\0a\xff", 3));
  expect_back(Color::kRed);
  expect_back(kMany);
  expect_back(std::optional<int>());
  expect_back(std::optional<int>(4));
  expect_back(std::variant<int, std::string, double>("x"));
  expect_back(std::variant<std::monostate, int>());
  expect_back(std::pair<int, std::string>(1, "a"));
  expect_back(std::tuple<>());
  expect_back(std::tuple<int, Color, std::vector<bool>>(1, Color::kGreen, {true, false}));
  for (const size_t size : {0, 15, 16, 17, 65'535, 65'536}) expect_back(std::vector<int64_t>(size, -5));
  expect_back(std::vector<char>{'a', 0});
  expect_back(std::vector<uint8_t>(300, 9));
  expect_back(std::vector<std::byte>(300, std::byte{9}));
  expect_back(std::array<double, 3>{1, 2, 3});
  expect_back(std::deque<int>{1, 2});
  expect_back(std::list<int>{1, 2});
  expect_back(std::map<std::string, std::vector<int>>{{"a", {1}}, {"b", {}}});
  expect_back(std::unordered_map<int, std::string>{{1, "a"}, {2, "b"}});
  expect_back(std::set<Color>{Color::kRed, Color::kGreen});
  expect_back(std::unordered_set<int>{1, 2, 3});
  EXPECT_EQ(*back(std::make_unique<int>(3)), 3);
  EXPECT_EQ(back(std::unique_ptr<int>()), nullptr);
  EXPECT_EQ(*back(std::make_shared<std::string>("x")), "x");
  EXPECT_EQ(back(std::shared_ptr<int>()), nullptr);
}

TEST(RpcSerialize, StructsWithTensorsInside) {
  Outer outer;
  outer.inner = {{"a", 1.5, Color::kGreen}, {"b", std::nullopt, Color::kRed}};
  outer.tensors = {{"x", at::ones({2})}, {"y", at::Tensor()}, {"z", at::arange(5)}};
  outer.choice = Inner{"c", 2, Color::kGreen};
  outer.maybe = std::make_unique<Inner>(Inner{"d", {}, {}});
  const auto inner = outer.inner;
  const at::Tensor x = outer.tensors["x"];
  const Outer got = back(std::move(outer));
  EXPECT_EQ(got.inner, inner);
  EXPECT_EQ(std::get<2>(got.choice).name, "c");
  EXPECT_EQ(got.maybe->name, "d");
  EXPECT_TRUE(got.tensors.at("x").is_same(x));  // the tensor itself travels beside the bytes
  EXPECT_FALSE(got.tensors.at("y").defined());
  EXPECT_EQ(got.tensors.at("z").numel(), 5);
  EXPECT_EQ(back(ByName{4, x}).a, 4);
  Tree tree{1, {{2, {}}, {3, {{4, {}}}}}};
  EXPECT_EQ(back(tree).children[1].children[0].value, 4);
}

TEST(RpcSerialize, UndefinedTensorsAndNulloptAreNotTheSame) {
  using Maybe = std::optional<at::Tensor>;
  EXPECT_FALSE(back(Maybe()).has_value());
  const auto undefined = back(Maybe(at::Tensor()));
  ASSERT_TRUE(undefined.has_value());
  EXPECT_FALSE(undefined->defined());
}

TEST(RpcSerialize, WhatIsMovedInIsHeldByThePayloadAlone) {
  std::vector<at::Tensor> list{at::ones({2}), at::ones({3})};
  at::Tensor one = at::ones({4});
  const at::Tensor kept = at::ones({5});
  Payload payload = pack(std::move(list), std::move(one), kept, std::map<int, at::Tensor>{{1, at::ones({1})}});
  ASSERT_EQ(payload.tensors.size(), 5u);
  for (const size_t i : {0, 1, 2, 4}) EXPECT_EQ(payload.tensors[i].use_count(), 1u) << i;
  EXPECT_EQ(payload.tensors[3].use_count(), 2u);
  PayloadReader reader{payload.body, payload.tensors};
  const auto [a, b, c, d] = unpack<std::vector<at::Tensor>, at::Tensor, at::Tensor, std::map<int, at::Tensor>>(reader);
  EXPECT_EQ(a[0].use_count(), 1u);
  EXPECT_EQ(b.use_count(), 1u);
  EXPECT_TRUE(payload.tensors.empty());
}

TEST(RpcSerialize, ArgumentsAreConvertedToTheParameters) {
  using Parameters = std::tuple<double, std::string, std::vector<int64_t>, std::optional<int>>;
  const std::array<int64_t, 2> numbers{1, 2};
  Payload payload = pack_for<Parameters>(1, "text", std::span<const int64_t>(numbers), 3);
  PayloadReader reader{payload.body, payload.tensors};
  const auto got = unpack<double, std::string, std::vector<int64_t>, std::optional<int>>(reader);
  EXPECT_EQ(got, Parameters(1.0, "text", {1, 2}, 3));
}

TEST(RpcSerialize, AHookForTypesThatNeedMoreThanTheirBytes) {
  int user = 0;
  const muster::detail::PackContext::Scope scope({nullptr, nullptr, &user});
  EXPECT_EQ(back(at::ones({1})).numel(), 1);
  EXPECT_EQ(muster::detail::pack_context().user, &user);
  EXPECT_EQ(muster::detail::pack_context().out, nullptr);  // the pack's own list is gone again
}

template <typename... T>
void unpack_bytes(std::string_view bytes, std::vector<at::Tensor> tensors = {}) {
  PayloadReader reader{bytes, tensors};
  unpack<T...>(reader);
}

std::string bytes(std::initializer_list<int> list) {
  std::string all;
  for (const int byte : list) all += static_cast<char>(byte);
  return all;
}

TEST(RpcSerialize, WhatDoesNotFitIsCorruptAndNamesTheType) {
  EXPECT_THROW(unpack_bytes<int>(""), CorruptError);
  EXPECT_THROW(unpack_bytes<int>(bytes({1, 2})), CorruptError);           // left over
  EXPECT_THROW((unpack_bytes<int, int>(bytes({1}))), CorruptError);       // too few
  EXPECT_THROW(unpack_bytes<int8_t>(bytes({0xcd, 1, 0})), CorruptError);  // 256
  EXPECT_THROW(unpack_bytes<unsigned>(bytes({0xff})), CorruptError);      // -1
  EXPECT_THROW(unpack_bytes<int>(bytes({0xc1})), CorruptError);           // not msgpack
  EXPECT_THROW(unpack_bytes<int>(bytes({0xcd, 1})), CorruptError);        // ends early
  EXPECT_THROW(unpack_bytes<std::string>(bytes({0xdb, 0xff, 0xff, 0xff, 0xff})), CorruptError);
  EXPECT_THROW((unpack_bytes<std::variant<int, bool>>(bytes({0x92, 2, 1}))), CorruptError);
  EXPECT_THROW((unpack_bytes<std::variant<int, bool>>(bytes({0x93, 0, 1, 1}))), CorruptError);
  EXPECT_THROW((unpack_bytes<std::array<int, 2>>(bytes({0x93, 0, 1, 1}))), CorruptError);
  EXPECT_THROW(unpack_bytes<at::Tensor>(bytes({0xd6, 1, 0, 0, 0, 0})), CorruptError);  // there is no tensor 0
  EXPECT_THROW(unpack_bytes<at::Tensor>(bytes({0xd6, 2, 0, 0, 0, 0}), {at::ones({1})}), CorruptError);
  EXPECT_THROW(unpack_bytes<at::Tensor>(bytes({0}), {at::ones({1})}), CorruptError);
  unpack_bytes<at::Tensor>(bytes({0xd6, 1, 0, 0, 0, 0}), {at::ones({1})});
  try {
    unpack_bytes<std::vector<std::string>>(bytes({0x91, 5}));
    FAIL();
  } catch (const CorruptError& error) {
    EXPECT_NE(std::string(error.what()).find("std::vector<std::string>"), std::string::npos) << error.what();
  }
}

TEST(RpcSerialize, AClaimTakesNoMemory) {
  // Nested arrays that each claim everything that is left: the sum of the claims is checked, not each claim alone.
  std::string nested;
  for (int i = 0; i < 100; ++i) nested += bytes({0xdc, 0x40, 0});
  nested += std::string(0x4000, 0);
  EXPECT_THROW(unpack_bytes<Tree>(nested), CorruptError);
  EXPECT_THROW(unpack_bytes<std::vector<int>>(bytes({0xdd, 0xff, 0xff, 0xff, 0xff})), CorruptError);
  EXPECT_THROW((unpack_bytes<std::map<int, int>>(bytes({0xdf, 0xff, 0xff, 0xff, 0xff, 0}))), CorruptError);
  EXPECT_THROW(unpack_bytes<Tree>(std::string(100'000, static_cast<char>(0x91))),
               CorruptError);  // too deep, no overflow
}

// Random bytes, and valid ones with some changed: they give a value or CorruptError, nothing else. Sanitizers see the
// rest.
template <typename... T>
void fuzz(std::mt19937& random, const Payload& good) {
  for (int round = 0; round < 3000; ++round) {
    std::string body = good.body;
    if (round % 3 == 0) {
      body.resize(random() % 64);
      for (char& byte : body) byte = static_cast<char>(random());
    } else {
      for (size_t change = random() % 4 + 1; change > 0 && !body.empty(); --change) {
        const size_t at = random() % body.size();
        switch (random() % 4) {
          case 0:
            body[at] = static_cast<char>(random());
            break;
          case 1:
            body.erase(at, random() % 4);
            break;
          case 2:
            body.insert(at, 1, static_cast<char>(random()));
            break;
          default:
            body[at] = static_cast<char>(body[at] ^ (1 << random() % 8));
        }
      }
    }
    std::vector<at::Tensor> tensors = good.tensors;
    PayloadReader reader{body, tensors};
    try {
      unpack<T...>(reader);
    } catch (const CorruptError&) {
    }
  }
}

TEST(RpcSerialize, FuzzedBytesAreCorruptAtWorst) {
  std::mt19937 random(7);
  fuzz<int, double, std::string>(random, pack(-70'000, 1.5, "text"));
  using Map = std::map<std::string, std::vector<int>>;
  fuzz<Map>(random, pack(Map{{"a", {1, 2, 3}}, {"long enough", {}}}));
  using Choice = std::variant<std::monostate, std::string, std::pair<int, bool>, std::optional<std::vector<float>>>;
  fuzz<Choice, Choice>(random, pack(Choice(std::string("x")), Choice(std::pair(1, true))));
  fuzz<std::vector<at::Tensor>, Color, std::unique_ptr<Inner>>(
      random, pack(std::vector{at::ones({1}), at::ones({2})}, Color::kGreen, std::make_unique<Inner>()));
  fuzz<Outer, ByName>(random, pack(Outer{{{"a", 1.5, Color::kGreen}}, {{"x", at::ones({1})}}, 3, nullptr}, ByName{}));
  fuzz<Tree>(random, pack(Tree{1, {{2, {}}, {3, {{4, {}}}}}}));
}

}  // namespace
}  // namespace muster::rpc
