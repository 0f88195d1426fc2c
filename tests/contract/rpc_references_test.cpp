// Objects on other workers: they are made, called through references that wander, and freed.
#include <vector>

#include "contract/rpc_fixture.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"

namespace muster::test::remote_calls {
namespace {

int bump(Counter& counter, int n) { return counter.add(n); }
int half(int number) { return number / 2; }
void set_number(int& number, int to) { number = to; }

RRef<Counter> pass_on(RRef<Counter> counter) { return counter; }
int hand_to(int worker, RRef<Counter> counter) { return rpc::sync<&bump_through>(worker, counter); }

// Its destructor calls the worker that has held it, and waits for the answer.
struct Farewell {
  explicit Farewell(int holder) : to(holder) {}
  Farewell(const Farewell&) = delete;
  Farewell& operator=(const Farewell&) = delete;
  ~Farewell() {
    std::string end = "said";
    try {
      rpc::sync<&nothing>(to);
    } catch (const std::exception& error) {
      end = error.what();
    }
    World::current().store().set("farewell", end);
  }
  int holder() const { return to; }
  int to;
};

TEST_P(Rpc, ObjectsAreMadeCalledAndFreed) {
  serve(3, [](World& world) {
    if (world.rank() == 0) {
      auto counter = rpc::remote<Counter>(1, 5);
      EXPECT_EQ(counter.owner().id, 1);
      EXPECT_FALSE(counter.is_owner());
      EXPECT_EQ(counter.sync<&Counter::add>(2), 7);
      EXPECT_EQ(counter.sync<&bump>(1), 8);
      EXPECT_EQ(rpc::sync<&bump_through>(2, counter), 9);   // a third worker
      EXPECT_EQ(rpc::sync<&bump_through>(1, counter), 10);  // its owner
      EXPECT_EQ(rpc::sync<&hand_to>(1, 2, counter), 11);    // the owner hands it on
      EXPECT_EQ(rpc::sync<&pass_on>(2, counter).sync<&Counter::get>(), 11);
      EXPECT_THROW(counter.local_value(), InvalidArgument);
      const auto result = rpc::remote<&twice>(2, at::ones({3}));
      EXPECT_TRUE(at::equal(result.to_here(), at::ones({3}) * 2));
      EXPECT_EQ(rpc::remote<&half>(2, 8).to_here(), 4);  // not of a class
      EXPECT_EQ(rpc::remote<std::string>(1, "text").to_here(), "text");
      const auto number = rpc::remote<int>(1, 5);
      number.sync<&set_number>(6);
      EXPECT_EQ(number.to_here(), 6);
      const auto mine = rpc::make_rref(std::make_shared<Counter>(1));
      EXPECT_EQ(rpc::sync<&bump_through>(1, mine), 2);
      EXPECT_EQ(mine.local_value()->value, 2);
      const auto here = rpc::remote<Counter>(0, 3);
      EXPECT_EQ(here.local_value()->value, 3);
      EXPECT_THROW((RRef<Counter>().sync<&Counter::get>()), InvalidArgument);
    }
    muster::barrier();
    EXPECT_TRUE(soon([] { return rpc::census().owned_objects == 0; })) << rpc::census().owned_objects;
    muster::barrier();
  });
}

TEST_P(Rpc, AnObjectThatCouldNotBeMade) {
  serve(2, [](World&) {
    const auto bad = rpc::remote<Counter>(1, -1);
    EXPECT_CONTAINS(message_of<RemoteError>([&] { bad.sync<&Counter::get>(); }), "a counter starts at 0");
  });
}

TEST_P(Rpc, ReferencesThatWanderAreCounted) {
  serve(3, [](World& world) {
    for (int i = 0; i < 40; ++i) {
      auto counter = rpc::remote<Counter>((world.rank() + 1) % 3, 0);
      std::vector<Future<RRef<Counter>>> wandering;
      for (int to = 0; to < 3; ++to) wandering.push_back(rpc::async<&pass_on>(to, counter));
      counter = RRef<Counter>();
      for (auto& back : wandering) EXPECT_GE(std::move(back).get().sync<&Counter::add>(1), 1);
    }
    muster::barrier();
    EXPECT_TRUE(soon([] { return rpc::census().owned_objects == 0; })) << rpc::census().owned_objects;
    muster::barrier();
  });
}

TEST_P(Rpc, AnObjectsEndMayCallAndWait) {
  serve(2, [](World& world) {
    if (world.rank() != 0) return;
    auto object = rpc::remote<Farewell>(1, 0);
    EXPECT_EQ(object.sync<&Farewell::holder>(), 0);
    object = RRef<Farewell>();
    EXPECT_EQ(world.store().get("farewell", patience()), "said");
  });
}

TEST_P(Rpc, ReferencesEndWithTheRpcThatTheyAreOf) {
  run(2, [](World& world) {
    const int to = 1 - world.rank();
    const auto number = [](const auto& rref) { return rpc::detail::object_of(*rref.reference()); };
    rpc::init();
    const auto there = rpc::remote<Counter>(to, 5);
    const auto result = rpc::remote<&twice>(to, at::ones({3}));
    const auto mine = rpc::make_rref(std::make_shared<Counter>(1));
    EXPECT_EQ(there.sync<&Counter::get>(), 5);
    rpc::shutdown();
    EXPECT_THROW(there.sync<&Counter::get>(), Aborted);
    rpc::init();
    {
      const auto there_now = rpc::remote<Counter>(to, 7);
      const auto result_now = rpc::remote<&twice>(to, at::ones({5}));
      const auto mine_now = rpc::make_rref(std::make_shared<Counter>(2));
      EXPECT_EQ(number(there), number(there_now));
      EXPECT_EQ(number(mine), number(mine_now));
      EXPECT_THROW(there.owner(), Aborted);
      EXPECT_THROW(there.sync<&Counter::get>(), Aborted);
      EXPECT_THROW(result.to_here(), Aborted);
      EXPECT_THROW(mine.local_value(), Aborted);
      EXPECT_THROW(rpc::sync<&bump_through>(to, mine), Aborted);
      EXPECT_THROW(rpc::sync<&bump_through>(to, there), Aborted);
      EXPECT_EQ(there_now.sync<&Counter::get>(), 7);
      EXPECT_EQ(result_now.to_here().numel(), 5);
      EXPECT_EQ(mine_now.local_value()->value, 2);
      EXPECT_EQ(rpc::census().pending_calls, 0u);  // to_here() came after the objects were made
    }
    rpc::shutdown();
  });
}

}  // namespace
}  // namespace muster::test::remote_calls
