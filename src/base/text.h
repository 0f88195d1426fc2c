// text(a, b, …): a string with the arguments one after another. For messages; not for hot paths.
// (GCC 12 has no <format>, and fmt comes only with libtorch, which this layer does not see.)
#pragma once

#include <sstream>
#include <string>

namespace muster {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return std::move(out).str();
}

// "a, b, c" from any range of printable things.
template <typename Range>
std::string join(const Range& range, const char* separator = ", ") {
  std::ostringstream out;
  const char* between = "";
  for (const auto& item : range) {
    out << between << item;
    between = separator;
  }
  return std::move(out).str();
}

}  // namespace muster
