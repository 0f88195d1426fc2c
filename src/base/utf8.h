// Characters of UTF-8: which bytes are some, and where a name may be cut.
//
// Thread-safety: functions of their arguments. Source: RFC 3629.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace muster {

// The bytes of the character that `text` begins with; 0 if it begins with none.
inline size_t utf8_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<uint8_t>(text[i]) : uint8_t{0}; };
  const auto follow = [&](size_t count) {
    for (size_t i = 1; i <= count; ++i)
      if ((byte(i) & 0xc0) != 0x80) return false;
    return true;
  };
  const uint8_t first = byte(0), second = byte(1);
  if (text.empty() || (first >= 0x80 && first < 0xc2) || first > 0xf4) return 0;
  if (first < 0x80) return 1;
  if (first < 0xe0) return follow(1) ? 2 : 0;
  // Not longer than it has to be, no half of a surrogate pair, and not beyond the last character.
  if (first < 0xf0) {
    const bool fits = (first != 0xe0 || second >= 0xa0) && (first != 0xed || second < 0xa0);
    return fits && follow(2) ? 3 : 0;
  }
  const bool fits = (first != 0xf0 || second >= 0x90) && (first != 0xf4 || second < 0x90);
  return fits && follow(3) ? 4 : 0;
}

inline bool is_utf8(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_length(text);
    if (length == 0) return false;
    text.remove_prefix(length);
  }
  return true;
}

// A name as messages have it: of a long one the first bytes, up to `most` and to the end of a character.
inline std::string shortened(std::string_view name, size_t most = 100) {
  if (name.size() <= most) return std::string(name);
  while (most > 0 && (name[most] & 0xc0) == 0x80) --most;
  return std::string(name.substr(0, most)) + "...";
}

}  // namespace muster
