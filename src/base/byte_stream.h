// Bytes on the wire between processes: fixed-width little-endian numbers and length-prefixed strings.
//
// WireReader checks every length against what is left before it reads or allocates anything, so a short or hostile
// message throws CorruptError and never causes a read past the end. Thread-safety: values; not shared.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "muster/base/error.h"

namespace muster {

static_assert(std::endian::native == std::endian::little,
              "Muster's wire format is little-endian, as its processors are");

class WireWriter {
 public:
  template <typename T>
  requires std::is_integral_v<T> || std::is_enum_v<T> WireWriter& put(T number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof number);
    return *this;
  }
  WireWriter& put(std::string_view string) {
    put(static_cast<uint32_t>(string.size()));
    bytes_.append(string);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  requires std::is_integral_v<T> || std::is_enum_v<T> T get() {
    T number;
    std::memcpy(&number, take(sizeof number).data(), sizeof number);
    return number;
  }
  std::string_view get_string() { return take(get<uint32_t>()); }  // valid as long as the message
  bool done() const { return rest_.empty(); }
  void expect_done() const {
    if (!done()) throw CorruptError("a message has bytes after its end");
  }

 private:
  std::string_view take(size_t size) {
    if (size > rest_.size()) throw CorruptError("a message is shorter than it says");
    const auto taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }
  std::string_view rest_;
};

}  // namespace muster
