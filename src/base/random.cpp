#include "base/random.h"

#include <sys/random.h>

#include <cerrno>
#include <vector>

#include "muster/base/error.h"

namespace muster {

std::string random_hex(size_t bytes) {
  std::vector<unsigned char> raw(bytes);
  for (size_t got = 0; got < bytes;) {
    const ssize_t n = ::getrandom(raw.data() + got, bytes - got, 0);
    if (n < 0 && errno != EINTR) throw_errno("getrandom");
    if (n > 0) got += static_cast<size_t>(n);
  }
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes);
  for (const unsigned char byte : raw) {
    hex.push_back(kDigits[byte >> 4]);
    hex.push_back(kDigits[byte & 15]);
  }
  return hex;
}

}  // namespace muster
