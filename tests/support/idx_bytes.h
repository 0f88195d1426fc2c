// Files of the format idx, made by tests.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace muster::test {

// The bytes of a file with an array of this shape and these elements; type 8 is uint8.
inline std::string idx(const std::vector<uint32_t>& shape, const std::string& data, char type = 8) {
  std::string bytes{0, 0, type, static_cast<char>(shape.size())};
  for (const uint32_t length : shape)
    for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(length >> shift);
  return bytes + data;
}

}  // namespace muster::test
