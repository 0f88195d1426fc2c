// Numbers that a store holds as text. Another process has written them, so they may be anything.
//
// Thread-safety: pure functions.
#pragma once

#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::store {

// The number, if the whole text is one from `least` to `most`.
inline std::optional<int64_t> number_of(std::string_view text, int64_t least, int64_t most) {
  int64_t number = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || stop != text.data() + text.size() || number < least || number > most) return std::nullopt;
  return number;
}

// The same for the value of a key. CorruptError, if it is anything else.
inline int64_t stored_number(std::string_view key, std::string_view value, int64_t least, int64_t most) {
  if (const auto number = number_of(value, least, most)) return *number;
  throw CorruptError(text("the store's key '", key, "': expected a whole number from ", least, " to ", most, ", got ",
                          value.size(), " bytes that are not one"),
                     "Look whether another program uses the same store");
}

}  // namespace muster::store
