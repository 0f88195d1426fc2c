// The environment, typed: a value that does not parse is InvalidArgument naming the variable, never a silent default.
//
// Thread-safety: as getenv(3): safe while nobody calls setenv.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace muster {

std::optional<std::string> env_string(const char* name);  // nullopt where unset or empty
std::optional<int64_t> env_int(const char* name);         // InvalidArgument unless a whole decimal number
int64_t require_env_int(const char* name);                // InvalidArgument where unset

}  // namespace muster
