// The parser of frames under libFuzzer, which finds its inputs by the branches that they reach. Built with clang only;
// frame_fuzz_test.cpp checks more about each input. The first byte says in which portions the rest comes.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>
#include <vector>

#include "muster/base/error.h"
#include "transport/tcp/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using muster::transport::FrameParser;
  if (size == 0) return 0;
  muster::transport::Limits limits;
  limits.body = 1 << 16;
  limits.pieces = 64;
  limits.bytes = 1 << 20;
  FrameParser parser{limits};
  const size_t portion = data[0] == 0 ? size : data[0];
  std::span<const uint8_t> rest(data + 1, size - 1);
  try {
    while (!rest.empty()) {
      // A copy of its own, so that a read past its end is seen.
      const auto some = rest.first(std::min(portion, rest.size()));
      const std::vector<uint8_t> copy(some.begin(), some.end());
      rest = rest.subspan(some.size());
      for (std::span<const std::byte> left = std::as_bytes(std::span(copy)); !left.empty();) {
        if (!parser.take(left)) continue;
        size_t sum = parser.body().size();
        for (const auto& piece : parser.pieces())
          for (size_t i = 0; i < piece.bytes; i += 64) sum += static_cast<size_t>(piece.data[i]);
        if (sum == SIZE_MAX) std::abort();  // so that the bytes are read
      }
    }
  } catch (const muster::CorruptError&) {
    // As it should be.
  }
  return 0;
}
