// What the tests of failed operations have in common.
#pragma once

#include <string>

#include "base/text.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test::comm_failures {

class Errors : public CommContract {
 protected:
  static void say(World& world, const std::string& key) { world.store().set(key, "1"); }
  static void hear(World& world, const std::string& key) { world.store().get(key, patience()); }

  // Whether all of `ranks` have the same text.
  static void expect_same(World& world, const std::string& key, const std::string& text, int ranks) {
    world.store().set(muster::text(key, world.rank()), text);
    for (int r = 0; r < ranks; ++r)
      EXPECT_EQ(world.store().get(muster::text(key, r), patience()), text) << "on rank " << r;
  }
};

}  // namespace muster::test::comm_failures
