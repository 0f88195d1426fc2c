#include "base/env.h"

#include <charconv>
#include <cstdlib>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {

std::optional<std::string> env_string(const char* name) {
  const char* value = std::getenv(name);
  if (!value || !*value) return std::nullopt;
  return value;
}

std::optional<int64_t> env_int(const char* name) {
  const auto value = env_string(name);
  if (!value) return std::nullopt;
  int64_t number = 0;
  const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
  if (error != std::errc() || end != value->data() + value->size())
    throw InvalidArgument(text("the environment variable ", name, ": expected a whole number, got '", *value, "'"),
                          text("Set ", name, " to a number or unset it"));
  return number;
}

int64_t require_env_int(const char* name) {
  const auto value = env_int(name);
  if (!value) throw InvalidArgument(text("the environment variable ", name, " is not set"), text("Set ", name));
  return *value;
}

}  // namespace muster
