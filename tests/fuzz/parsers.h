// Everything in Muster that reads bytes from outside, each as one function of bytes, for two drivers: parser_fuzz.h
// feeds mutants in the gate, and libfuzzer_parsers.cpp is libFuzzer's way in. (Frames and remote calls have fuzzers of
// their own, beside these.)
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace muster::test {

struct Parser {
  const char* name;
  // Returns, whatever the bytes are. It catches the errors that its parser may throw for bad bytes; anything else that
  // it throws is a defect.
  void (*parse)(std::string_view bytes);
  // Some bytes that are right, from which mutants are made.
  std::vector<std::string> (*seeds)();
};

// What the ranks of a group read from each other over a wire; one of torch_parsers().
Parser wire_parser();

// Of the layers without libtorch, and of the others.
const std::vector<Parser>& core_parsers();
const std::vector<Parser>& torch_parsers();

}  // namespace muster::test
