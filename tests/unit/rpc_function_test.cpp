// The table of functions, and calls of them from packed arguments to packed results.
#include "muster/rpc/function.h"

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <stdexcept>

#include "muster/base/error.h"
#include "rpc/values/error_reply.h"

namespace muster::rpc {
const Function& twin_in_another_file();
static int twin(int x) { return x + 1; }
}  // namespace muster::rpc

namespace rpc_function_test {

using namespace muster;
using namespace muster::rpc;
namespace inner = muster::rpc::detail;

struct Config {
  int depth = 0;
  std::string name;
  MSGPACK_DEFINE(depth, name);
};

class Base {
 public:
  virtual ~Base() = default;
  int from_base(int x) const { return base + x; }
  int base = 100;
};
struct Other {
  int64_t padding = 7;
  virtual ~Other() = default;
};
class Model : public Other, public Base {
 public:
  Model() = default;
  Model(const Config& config, int extra) : value(config.depth + extra), name(config.name) {}
  int add(int x) { return value += x; }
  int read() const noexcept { return value; }
  const std::string& title() const& { return name; }
  std::span<const int> numbers() { return list; }
  int value = 0;
  std::string name = "model";
  std::vector<int> list{1, 2, 3};
};

int add(int a, int b) { return a + b; }
int quiet(int a) noexcept { return -a; }
void nothing() {}
[[noreturn]] void fail(std::string what) { throw std::out_of_range(what); }
at::Tensor same(at::Tensor x) { return x; }
at::Tensor by_reference(const at::Tensor& x) { return x.add(1); }
const std::vector<int>& first(const std::vector<int>& a, const std::vector<int>&) { return a; }
size_t views(std::string_view text, std::span<const double> numbers, at::IntArrayRef sizes, const char* c) {
  return text.size() * 1000 + numbers.size() * 100 + sizes.size() * 10 + std::strlen(c);
}
std::string_view view_of(const std::string& text) { return std::string_view(text).substr(1); }
int take(std::unique_ptr<int> pointer, std::string&& text) { return *pointer + static_cast<int>(text.size()); }
int on_model(Model& model, int x) { return model.value * x; }
std::unique_ptr<Model> make(int value) {
  auto model = std::make_unique<Model>();
  model->value = value;
  return model;
}
Model by_value() { return {}; }
std::unique_ptr<int> boxed(int x) { return std::make_unique<int>(x); }
constexpr auto twice = [](int x) { return 2 * x; };
template <typename T>
T generic(T x) {
  return x;
}
Promise<int>* waiting = nullptr;
std::weak_ptr<int> argument_alive;
struct Counted {
  std::shared_ptr<int> alive = std::make_shared<int>(1);
  void msgpack_pack(auto& out) const { out.pack(1); }
  void msgpack_unpack(const msgpack::object&) { argument_alive = alive; }
};
Task<int> later(const std::string& text, Counted counted) {
  Promise<int> promise;
  waiting = &promise;
  const int x = co_await promise.future();
  if (x < 0) throw std::domain_error("negative " + text);
  co_return x + static_cast<int>(text.size());
}
Task<void> later_nothing() { co_return; }
Task<std::unique_ptr<Model>> make_later() { co_return make(8); }
std::span<const int> first_two(const std::vector<int>& all) { return std::span(all).first(2); }

template <auto F, typename... A>
Outcome call(const Function& function, void* object, bool store, A&&... args) {
  Payload payload = pack_for<arguments_of<F>>(std::forward<A>(args)...);
  PayloadReader reader{payload.body, payload.tensors};
  const auto invocation = function.decode(reader);
  std::optional<Outcome> got;
  invocation->run(object, store, [&](Outcome&& outcome) { got = std::move(outcome); });
  EXPECT_TRUE(got.has_value());
  return std::move(*got);
}
template <typename R>
R value(Outcome outcome) {
  if (outcome.error) std::rethrow_exception(outcome.error);
  PayloadReader reader{outcome.value.body, outcome.value.tensors};
  return std::get<0>(unpack<R>(reader));
}
template <auto F, typename... A>
auto call_value(A&&... args) {
  return value<result_of<F>>(call<F>(function_of<F>(), nullptr, false, std::forward<A>(args)...));
}

TEST(RpcFunction, NamesIdsAndTypes) {
  const Function& f = function_of<&add>();
  EXPECT_EQ(&f, &function_of<&add>());
  EXPECT_EQ(find_function(f.id), &f);
  EXPECT_EQ(find_function(f.id + 1), nullptr);
  EXPECT_EQ(f.name, "rpc_function_test::add(int, int)");
  EXPECT_EQ(function_of<&same>().name, "rpc_function_test::same(at::Tensor)");
  EXPECT_EQ(function_of<&fail>().name, "rpc_function_test::fail(std::string)");
  EXPECT_EQ(function_of<&Model::read>().name, "rpc_function_test::Model::read() const");
  EXPECT_EQ(function_of<&Model::add>().name, "rpc_function_test::Model::add(int)");
  EXPECT_EQ(function_of<&generic<int>>().name, "int rpc_function_test::generic<int>(int)");
  EXPECT_NE(function_of<twice>().name.find("lambda"), std::string::npos) << function_of<twice>().name;
  EXPECT_EQ((constructor_of<Model, Config, int>().name),
            "rpc_function_test::Model::Model(rpc_function_test::Config, int)");
  EXPECT_EQ((constructor_of<std::vector<int>, int>().name), "std::vector<int>::vector(int)");
  EXPECT_EQ(type_name(typeid(std::map<std::string, std::vector<int>>)),
            "std::map<std::string, std::vector<int>, std::less<std::string>>");
  EXPECT_NE(function_of<&generic<int>>().id, function_of<&generic<double>>().id);
  EXPECT_EQ(f.object_type, nullptr);
  EXPECT_EQ(*f.result_type, typeid(int));
  EXPECT_EQ(*function_of<&Model::add>().object_type, typeid(Model));
  EXPECT_EQ(*function_of<&on_model>().object_type, typeid(Model));
  EXPECT_EQ(*function_of<&make>().stored_type, typeid(Model));
  EXPECT_EQ(function_of<&nothing>().stored_type, nullptr);
  EXPECT_EQ(*function_of<&later>().result_type, typeid(int));
  static_assert(std::same_as<arguments_of<&on_model>, std::tuple<int>> && std::same_as<object_of<&on_model>, Model>);
  static_assert(std::same_as<result_of<&first_two>, std::vector<int>> &&
                std::same_as<result_of<&view_of>, std::string>);
}

// No code that runs names this function: it was added to the table when the program started.
int never_called(int x) { return x; }
[[maybe_unused]] const Function& unused() { return function_of<&never_called>(); }
const size_t count_before_main = function_count();

TEST(RpcFunction, IsThereFromTheStartOfTheProgram) {
  EXPECT_GT(count_before_main + function_count(), 10u);
  bool found = false;
  const std::string name = typeid(inner::Tag<&never_called, void>).name();
  uint64_t hash = 0xcbf29ce484222325;
  for (const char byte : name) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  found = find_function(hash) != nullptr;
  EXPECT_TRUE(found);
}

TEST(RpcFunction, CallsOfEveryKind) {
  EXPECT_EQ((call_value<&add>(2, 3)), 5);
  EXPECT_EQ((call_value<&add>(2.9, true)), 3);  // converted as in a call
  EXPECT_EQ(call_value<&quiet>(2), -2);
  EXPECT_EQ(call_value<twice>(4), 8);
  EXPECT_EQ(call_value<&generic<std::string>>("x"), "x");
  const std::vector<double> numbers{1, 2, 3};
  EXPECT_EQ((call_value<&views>("ab", numbers, std::vector<int64_t>{1, 2, 3, 4}, "hello")), 2345u);
  EXPECT_EQ((call_value<&first>(std::vector{1, 2}, std::vector<int>{})), (std::vector{1, 2}));
  EXPECT_EQ(call_value<&view_of>("text"), "ext");
  EXPECT_EQ(call_value<&first_two>(std::vector{5, 6, 7}), (std::vector{5, 6}));
  EXPECT_EQ((call_value<&take>(std::make_unique<int>(4), "abc")), 7);
  EXPECT_EQ(*call_value<&boxed>(6), 6);
  const Outcome none = call<&nothing>(function_of<&nothing>(), nullptr, false);
  EXPECT_FALSE(none.error);
  EXPECT_TRUE(none.value.body.empty());
}

TEST(RpcFunction, MembersAndFunctionsOfAnObject) {
  Model model;
  EXPECT_EQ(value<int>(call<&Model::add>(function_of<&Model::add>(), &model, false, 5)), 5);
  EXPECT_EQ(value<int>(call<&Model::read>(function_of<&Model::read>(), &model, false)), 5);
  EXPECT_EQ(value<std::string>(call<&Model::title>(function_of<&Model::title>(), &model, false)), "model");
  EXPECT_EQ(value<std::vector<int>>(call<&Model::numbers>(function_of<&Model::numbers>(), &model, false)),
            (std::vector{1, 2, 3}));
  EXPECT_EQ(value<int>(call<&on_model>(function_of<&on_model>(), &model, false, 3)), 15);
  // A member of a base on an object of the derived class, where the base has another address.
  const Function& of_base = function_of<&Model::from_base, Model>();
  EXPECT_EQ(value<int>(call<&Model::from_base>(of_base, &model, false, 1)), 101);
  EXPECT_EQ(*of_base.object_type, typeid(Model));
}

TEST(RpcFunction, ResultsThatStay) {
  const auto stored = [](Outcome outcome) {
    EXPECT_FALSE(outcome.error);
    EXPECT_EQ(*outcome.type, typeid(Model));
    return std::static_pointer_cast<Model>(outcome.object);
  };
  EXPECT_EQ(stored(call<&make>(function_of<&make>(), nullptr, true, 7))->value, 7);
  EXPECT_EQ(stored(call<&by_value>(function_of<&by_value>(), nullptr, true))->value, 0);
  EXPECT_EQ(stored(call<&make_later>(function_of<&make_later>(), nullptr, true))->value, 8);
  constexpr auto constructor = &inner::construct<Model, Config, int>;
  const auto model = stored(call<constructor>(constructor_of<Model, Config, int>(), nullptr, true, Config{2, "n"}, 3));
  EXPECT_EQ(model->value, 5);
  EXPECT_EQ(model->name, "n");
  const Outcome number = call<&add>(function_of<&add>(), nullptr, true, 1, 2);
  EXPECT_EQ(*std::static_pointer_cast<int>(number.object), 3);
  // A result that cannot be sent is reported when it is to be sent.
  EXPECT_THROW(value<int>(call<&make>(function_of<&make>(), nullptr, false, 7)), InvalidArgument);
}

TEST(RpcFunction, TheArgumentsAreGoneBeforeTheResultIsPacked) {
  const Outcome moved = call<&same>(function_of<&same>(), nullptr, false, at::ones({3}));
  EXPECT_EQ(moved.value.tensors.at(0).use_count(), 1u);
  EXPECT_EQ(moved.value.tensors.at(0).storage().use_count(), 1u);
  const Outcome fresh = call<&by_reference>(function_of<&by_reference>(), nullptr, false, at::ones({3}));
  EXPECT_EQ(fresh.value.tensors.at(0).use_count(), 1u);
}

TEST(RpcFunction, WhatIsThrownIsInTheOutcome) {
  const Outcome outcome = call<&fail>(function_of<&fail>(), nullptr, false, "no such key");
  EXPECT_THROW(std::rethrow_exception(outcome.error), std::out_of_range);
  Payload bad{"\x01", {}};
  PayloadReader reader{bad.body, bad.tensors};
  EXPECT_THROW(function_of<&add>().decode(reader), CorruptError);
}

TEST(RpcFunction, CoroutinesKeepTheirArgumentsAndAnswerLater) {
  for (const bool fails : {false, true}) {
    Payload payload = pack_for<arguments_of<&later>>("text", Counted());
    PayloadReader reader{payload.body, payload.tensors};
    std::unique_ptr<Invocation> invocation = function_of<&later>().decode(reader);
    std::optional<Outcome> got;
    invocation->run(nullptr, false, [&](Outcome&& outcome) {
      EXPECT_TRUE(argument_alive.expired());
      invocation.reset();  // an agent may do this
      got = std::move(outcome);
    });
    EXPECT_FALSE(got.has_value());
    EXPECT_FALSE(argument_alive.expired());
    payload.body.assign(payload.body.size(), 'x');  // the transport reuses its memory
    waiting->try_set_value(fails ? -1 : 3);
    ASSERT_TRUE(got.has_value());
    if (fails) {
      EXPECT_EQ(inner::describe(got->error).message, "negative text");
    } else {
      EXPECT_EQ(value<int>(std::move(*got)), 7);
    }
  }
  const Outcome none = call<&later_nothing>(function_of<&later_nothing>(), nullptr, false);
  EXPECT_FALSE(none.error);
}

TEST(RpcFunction, TwoWithOneNameAreToldAtTheCall) {
  const Function& here = function_of<&twin>();
  const Function& there = twin_in_another_file();
  ASSERT_EQ(here.id, there.id);
  EXPECT_NE(&here, &there);
  try {
    find_function(here.id);
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("muster::rpc::twin(int)"), std::string::npos) << what;
    EXPECT_NE(what.find(" and the one "), std::string::npos) << what;
  }
}

TEST(RpcError, ReadsWell) {
  const auto reply = [](auto thrown) { return inner::describe(std::make_exception_ptr(thrown)); };
  const ErrorReply sent = reply(std::out_of_range("no such key"));
  const ErrorReply got = inner::decode_error(inner::encode(sent));
  const RemoteError error("ps", "forward(at::Tensor)", got.type, got.message);
  EXPECT_STREQ(error.what(), "worker \"ps\" in forward(at::Tensor): std::out_of_range: no such key");
  EXPECT_EQ(error.worker(), "ps");
  EXPECT_EQ(error.type(), "std::out_of_range");
  EXPECT_THROW(std::rethrow_exception(inner::remote_error("ps", "f()", got)), RemoteError);
  EXPECT_EQ(reply(InvalidArgument("bad", "Do this")).advice, "Do this");
  EXPECT_EQ(reply(InvalidArgument("bad", "Do this")).type, "muster::InvalidArgument");
  EXPECT_EQ(reply(5).type, "int");
  EXPECT_LT(reply(std::runtime_error(std::string(1'000'000, 'x'))).message.size(), 70'000u);
  for (const auto& bytes : {std::string(), std::string("\xff\xff\xff\xff"), inner::encode(sent) + "x"})
    EXPECT_THROW(inner::decode_error(bytes), CorruptError);
}

}  // namespace rpc_function_test
