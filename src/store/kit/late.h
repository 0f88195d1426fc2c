// The errors of waits whose deadline has passed, the same for every store: they name the keys.
//
// Thread-safety: functions.
#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/kit/quote.h"

namespace muster::store {

inline std::string quote_some(const std::vector<std::string>& keys) {
  static constexpr size_t kMaxNamed = 16;
  const size_t named = std::min(keys.size(), kMaxNamed);
  std::vector<std::string> names;
  for (size_t i = 0; i < named; ++i) names.push_back(quote(keys[i]));
  return join(names) + (keys.size() > named ? text(" and ", keys.size() - named, " more") : "");
}

inline TimeoutError nobody_set(const std::vector<std::string>& missing) {
  return TimeoutError(
      text("nobody set the store's ", missing.size() > 1 ? "keys " : "key ", quote_some(missing), " in time"), {},
      "A rank that sets them may have failed or not have started; look at its output");
}

inline TimeoutError did_not_change(const std::string& key) {
  return TimeoutError(text("the store's key ", quote(key), " did not change in time"));
}

}  // namespace muster::store
