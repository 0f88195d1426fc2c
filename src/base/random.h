// Random bytes from the kernel (getrandom(2)), for names and nonces that nobody can guess.
#pragma once

#include <cstddef>
#include <string>

namespace muster {

std::string random_hex(size_t bytes);  // 2 * bytes hexadecimal digits

}  // namespace muster
