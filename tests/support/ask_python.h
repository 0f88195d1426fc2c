// References that Python computes: a script of tests/ answers each line of its standard input with numbers on one line.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/places.h"

namespace muster::test {

// Whether the build's Python has this module. It is not imported: that takes seconds with torch.
inline bool python_has(const std::string& module) {
  const std::string program = "import importlib.util as u, sys; sys.exit(u.find_spec(\"" + module + "\") is None)";
  return std::system(("'" + std::string(kPython) + "' -c '" + program + "' > /dev/null 2>&1").c_str()) == 0;
}

inline std::vector<std::vector<double>> ask_python(const std::string& script, const std::vector<std::string>& lines) {
  const auto base = std::filesystem::temp_directory_path() / ("muster_ask_" + std::to_string(::getpid()));
  const std::string in = base.string() + ".in", out = base.string() + ".out";
  {
    std::ofstream file(in);
    for (const auto& line : lines) file << line << '\n';
  }
  const int status = std::system(("'" + std::string(kPython) + "' -W ignore '" + kSourceFolder + "/tests/" + script +
                                  "' < '" + in + "' > '" + out + "'")
                                     .c_str());
  std::vector<std::vector<double>> answers;
  std::ifstream file(out);
  for (std::string line; std::getline(file, line);) {
    auto& numbers = answers.emplace_back();
    std::istringstream words(line);
    for (std::string word; words >> word;) numbers.push_back(std::strtod(word.c_str(), nullptr));
  }
  std::filesystem::remove(in);
  std::filesystem::remove(out);
  EXPECT_EQ(status, 0);
  return answers;
}

// The largest difference of two lists; infinity if they have different lengths, or something that is not a number.
inline double farthest(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double apart = std::abs(a[i] - b[i]);
    if (!std::isfinite(apart)) return std::numeric_limits<double>::infinity();
    most = std::max(most, apart);
  }
  return most;
}

// Numbers of ours that must equal those that a script answers: to the tolerance, or to this part of the largest of them
// if that is above 1. (A gradient through a hundred steps may be 100,000, of which 1e-10 is the last bit.)
class Comparison {
 public:
  void add(std::string question, std::vector<double> ours, double tolerance) {
    questions_.push_back(std::move(question));
    expected_.push_back({std::move(ours), tolerance});
  }
  void with(const std::string& script) const {
    const auto theirs = ask_python(script, questions_);
    ASSERT_EQ(theirs.size(), questions_.size());
    for (size_t i = 0; i < theirs.size(); ++i) {
      double largest = 1;
      for (const double one : theirs[i]) largest = std::max(largest, std::abs(one));
      EXPECT_LE(farthest(expected_[i].ours, theirs[i]), expected_[i].tolerance * largest) << questions_[i];
    }
  }

 private:
  struct Expected {
    std::vector<double> ours;
    double tolerance;
  };
  std::vector<std::string> questions_;
  std::vector<Expected> expected_;
};

}  // namespace muster::test

#define MUSTER_NEEDS_TORCHOPT()              \
  if (!muster::test::python_has("torchopt")) \
  GTEST_SKIP() << "no Python with torchopt ('" << muster::test::kPython << "'): pip install torchopt==0.7.3"
