// Random bytes from the kernel (getrandom(2)), for secrets and nonces that nobody can guess, and for names that do not
// collide.
//
// Thread-safety: all functions.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace muster {

void random_bytes(std::span<unsigned char> bytes);
std::string random_hex(size_t bytes);  // 2 * bytes hexadecimal digits

// Two lower-case digits per byte.
std::string to_hex(std::span<const unsigned char> bytes);

}  // namespace muster
