// Keys and values in messages: quoted, escaped and cut to a readable length, because they may be any bytes.
#pragma once

#include <string>
#include <string_view>

namespace muster::store {

inline std::string quote(std::string_view bytes) {
  static constexpr size_t kMaxShown = 120;
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string shown = "'";
  for (const char c : bytes.substr(0, kMaxShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f && c != '\\') {
      shown += c;
    } else {
      shown += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return shown + (bytes.size() > kMaxShown ? "…'" : "'");
}

}  // namespace muster::store
