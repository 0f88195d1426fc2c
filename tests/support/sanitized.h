// Whether this is a build for a sanitizer, which is slower by five to fifty times: tests then repeat less, and allow
// more time.
#pragma once

namespace muster::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitizesThreads = true;
#else
inline constexpr bool kSanitizesThreads = false;
#endif

}  // namespace muster::test
