// The parsers of fuzz/parsers.h under libFuzzer and AddressSanitizer. Built with clang only.
//
//   MUSTER_FUZZ_PARSER=etcd libfuzzer_parsers -max_total_time=3600 folder
//
// If `folder`, for the inputs, is empty, the parser's seeds are written into it. Inputs that show a defect go to
// fuzz/corpus/<parser>, from where the gate takes them.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>

#include "fuzz/parsers.h"

namespace {

using muster::test::Parser;

const Parser* parser = nullptr;

const Parser* find(std::string_view name) {
  for (const auto* const list : {&muster::test::core_parsers(), &muster::test::torch_parsers()})
    for (const Parser& each : *list)
      if (each.name == name) return &each;
  return nullptr;
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const char* const name = std::getenv("MUSTER_FUZZ_PARSER");
  parser = find(name ? name : "");
  if (!parser) {
    std::fprintf(stderr, "MUSTER_FUZZ_PARSER is '%s': expected the name of a parser (fuzz/parsers.h)\n",
                 name ? name : "");
    std::exit(2);
  }
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path folder = (*argv)[i];
    if ((*argv)[i][0] == '-') continue;
    std::filesystem::create_directories(folder);
    if (!std::filesystem::is_empty(folder)) break;
    int number = 0;
    for (const auto& seed : parser->seeds())
      std::ofstream(folder / ("seed-" + std::to_string(number++)), std::ios::binary) << seed;
    break;
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  parser->parse({reinterpret_cast<const char*>(data), size});
  return 0;
}
