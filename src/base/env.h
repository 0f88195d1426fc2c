// Typed access to the environment: a value that does not parse throws InvalidArgument, which names the variable; it is
// never silently replaced by a default.
//
// Thread-safety: as getenv(3): safe while no thread calls setenv.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace muster {

std::optional<std::string> env_string(const char* name);  // nullopt if unset or empty
std::optional<int64_t> env_int(const char* name);         // InvalidArgument unless a whole decimal number
int64_t require_env_int(const char* name);                // InvalidArgument if unset

}  // namespace muster
