#include "base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <vector>

#include "muster/base/error.h"

namespace muster {

void random_bytes(std::span<unsigned char> bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::getrandom(bytes.data(), bytes.size(), 0);
    if (n < 0 && errno != EINTR) throw_errno("getrandom");
    if (n > 0) bytes = bytes.subspan(static_cast<size_t>(n));
  }
}

std::string to_hex(std::span<const unsigned char> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const unsigned char byte : bytes) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> raw(bytes);
  random_bytes(raw);
  return to_hex(raw);
}

}  // namespace muster
