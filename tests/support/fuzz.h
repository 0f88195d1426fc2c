// What the fuzzers share: how often they run, and what they do to bytes.
//
//   MUSTER_FUZZ_ROUNDS, MUSTER_FUZZ_SEED, MUSTER_FUZZ_SECONDS: see fuzz/frame_fuzz_test.cpp
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

#include "base/env.h"
#include "muster/base/deadline.h"
#include "support/dice.h"

namespace muster::test {

inline std::string mutated(std::string bytes, Dice& dice) {
  for (size_t changes = 1 + dice.below(3); changes > 0 && !bytes.empty(); --changes) {
    // Mostly where the lengths are.
    const size_t at = dice.below(dice.one_in(2) ? std::min<size_t>(bytes.size(), 32) : bytes.size());
    switch (dice.below(5)) {
      case 0:
        bytes[at] = static_cast<char>(bytes[at] ^ 1 << dice.below(8));
        break;
      case 1:
        bytes[at] = dice.one_in(2) ? '\xff' : '\x00';
        break;
      case 2:
        bytes.erase(at, 1 + dice.below(20));
        break;
      case 3:
        bytes.insert(at, dice.bytes(1 + dice.below(20)));
        break;
      default:
        for (size_t i = at; i < std::min(at + 8, bytes.size()); ++i) bytes[i] = dice.one_in(2) ? '\xff' : '\x00';
    }
  }
  return bytes;
}

// Runs round(number) as often as the environment says.
template <typename Round>
int64_t repeat(int64_t rounds, Round round) {
  const int64_t first = env_int("MUSTER_FUZZ_SEED").value_or(0), seconds = env_int("MUSTER_FUZZ_SECONDS").value_or(0);
  rounds = env_int("MUSTER_FUZZ_ROUNDS").value_or(rounds);
  const auto end = Clock::now() + std::chrono::seconds(seconds);
  int64_t i = first;
  for (; (seconds > 0 ? Clock::now() < end : i < first + rounds) && !testing::Test::HasFailure(); ++i) {
    SCOPED_TRACE("round " + std::to_string(i));
    round(static_cast<uint64_t>(i));
  }
  return i - first;
}

}  // namespace muster::test
