// Parsers against mutants, in the gate: each parser gets its seeds, the files of fuzz/corpus/<name> (inputs that once
// showed a defect) and mutants of both.
//
//   MUSTER_FUZZ_SECONDS=3600 core_tests --gtest_filter='*ParserFuzz*/etcd'
//   MUSTER_FUZZ_SEED=77 MUSTER_FUZZ_ROUNDS=1 core_tests --gtest_filter='*ParserFuzz*/etcd'   # round 77 again
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "fuzz/parsers.h"
#include "support/dice.h"
#include "support/fuzz.h"
#include "support/places.h"
#include "support/sanitized.h"

namespace muster::test {

class ParserFuzz : public testing::TestWithParam<Parser> {
 protected:
  static std::vector<std::string> inputs() {
    std::vector<std::string> all = GetParam().seeds();
    const std::filesystem::path folder = std::filesystem::path(kSourceFolder) / "tests/fuzz/corpus" / GetParam().name;
    if (std::filesystem::is_directory(folder))
      for (const auto& file : std::filesystem::directory_iterator(folder)) {
        std::ifstream in(file.path(), std::ios::binary);
        all.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
      }
    return all;
  }
};

TEST_P(ParserFuzz, AnyBytes) {
  const auto all = inputs();
  for (const auto& input : all) ASSERT_NO_THROW(GetParam().parse(input));
  ASSERT_NO_THROW(GetParam().parse({}));
  repeat(kSanitizesThreads ? 200 : 2000, [&](uint64_t round) {
    Dice dice(round);
    std::string bytes = mutated(all[dice.below(all.size())], dice);
    if (dice.one_in(20)) bytes = dice.bytes(dice.below(200));
    ASSERT_NO_THROW(GetParam().parse(bytes));
  });  // a parser has one thread, so ThreadSanitizer has little to see
}

inline std::string name_of_parser(const testing::TestParamInfo<Parser>& info) { return info.param.name; }

}  // namespace muster::test
