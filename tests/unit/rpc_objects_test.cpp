// The table of a worker's objects, also with messages that no correct worker sends: ranks that do not exist.
#include "rpc/objects/object_table.h"

#include <gtest/gtest.h>

#include <climits>

#include "rpc/objects/agent_messages.h"

namespace muster::test {
namespace {

using rpc::object_id;
using rpc::ObjectTable;
using rpc::StoredObject;

StoredObject an_int() { return {.value = std::make_shared<int>(7), .type = &typeid(int)}; }

TEST(RpcObjects, AReferenceIsCountedFromOneWorkerToAnother) {
  ObjectTable objects(0, 3);
  const uint64_t id = object_id(1, 1);
  objects.expect(id, 1);
  objects.set(id, an_int());
  objects.add_transit(id, 1, 2, 5);
  objects.release(id, 1);
  EXPECT_EQ(objects.size(), 1u);
  objects.received(id, 1, 5, 2);
  objects.release(id, 2);
  EXPECT_EQ(objects.size(), 0u);
}

TEST(RpcObjects, OneThatIsPutIsHeldByWhomItIsFor) {
  ObjectTable objects(0, 3);
  const uint64_t id = object_id(0, 1), other = object_id(0, 2);
  objects.put(id, an_int(), 2);
  EXPECT_TRUE(objects.find(id));
  objects.release(id, 1);  // worker 1 has no hold, so it takes none away
  EXPECT_EQ(objects.size(), 1u) << objects.describe();
  objects.release(id, 2);
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
  // The worker that holds it may be lost afterwards, or before.
  objects.put(id, an_int(), 2);
  objects.lost(2);
  objects.drained(1, 2);
  objects.put(other, an_int(), 2);
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
  objects.close();
  objects.put(id, an_int(), 1);
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
}

// Destroying a value may take long and call anything, so it is left to the caller.
TEST(RpcObjects, WhatNobodyHoldsIsTheCallersToEnd) {
  ObjectTable objects(0, 3);
  const uint64_t id = object_id(0, 1), ours = object_id(0, 2);
  bool ended = false;
  const auto value = [&] { return std::shared_ptr<void>(&ended, [&](void*) { ended = objects.size() == 0; }); };
  objects.put(id, {.value = value(), .type = &typeid(int)}, 1);
  {
    const auto garbage = objects.release(id, 1);
    EXPECT_TRUE(garbage.has_users);
    EXPECT_EQ(objects.size(), 0u) << objects.describe();
    EXPECT_FALSE(ended);
  }
  EXPECT_TRUE(ended);
  objects.put(id, {.value = value(), .type = &typeid(int)}, 1);
  objects.put(ours, {.value = std::make_shared<int>(7), .type = &typeid(int), .is_ours = true}, 2);
  EXPECT_FALSE(objects.release(ours, 2).has_users);
  objects.lost(1);
  EXPECT_TRUE(objects.drained(2, 1).has_users);
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
}

TEST(RpcObjects, WorkersThatThereAreNotHoldNothing) {
  ObjectTable objects(0, 3);
  const uint64_t id = object_id(1, 1);
  objects.expect(id, 1);
  objects.set(id, an_int());
  for (const int nobody : {-1, 3, INT_MAX, INT_MIN}) {
    objects.add_hold(id, nobody);
    objects.add_transit(id, 1, nobody, 5);
    objects.received(id, 1, 6, nobody);
    objects.drained(1, nobody);
  }
  objects.release(id, 1);
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
  // Objects whose creator does not exist are not created when messages mention them.
  for (const int creator : {3, 65'535}) {
    objects.add_hold(object_id(creator, 1), 1);
    objects.add_transit(object_id(creator, 1), 1, 2, 5);
    EXPECT_FALSE(objects.when_ready(object_id(creator, 1), [](const StoredObject&) { ADD_FAILURE(); }));
  }
  EXPECT_EQ(objects.size(), 0u) << objects.describe();
}

}  // namespace
}  // namespace muster::test
