// text(a, b, …): a string with the arguments one after another. For messages; not for hot paths.
// (GCC 12 has no <format>, and fmt comes only with libtorch, which this layer does not see.)
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <utility>

namespace muster {

// What a program writes for other programs, and reads from them, does not depend on the locale that it has chosen: 1000
// is "1000", not "1,000".
class PlainOutput : public std::ostringstream {
 public:
  PlainOutput() { imbue(std::locale::classic()); }
};
class PlainInput : public std::istringstream {
 public:
  explicit PlainInput(const std::string& text = {}) : std::istringstream(text) { imbue(std::locale::classic()); }
};

template <typename... Parts>
std::string text(const Parts&... parts) {
  PlainOutput out;
  (out << ... << parts);
  return std::move(out).str();
}

// "a, b, c" from any range of printable things.
template <typename Range>
std::string join(const Range& range, const char* separator = ", ") {
  PlainOutput out;
  const char* between = "";
  for (const auto& item : range) {
    out << between << item;
    between = separator;
  }
  return std::move(out).str();
}

}  // namespace muster
