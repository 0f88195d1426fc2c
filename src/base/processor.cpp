#include "base/processor.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace muster {

bool is_zen_5_or_later() {
#if defined(__x86_64__)
  constexpr unsigned kAuthenticAmd[] = {0x68747541, 0x69746e65, 0x444d4163};  // in ebx, edx, ecx
  constexpr unsigned kZen5 = 0x1a, kFsrm = 1U << 4;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != kAuthenticAmd[0] || d != kAuthenticAmd[1] || c != kAuthenticAmd[2])
    return false;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  const unsigned base = a >> 8 & 0xf, family = base == 0xf ? base + (a >> 20 & 0xff) : base;
  return family >= kZen5 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kFsrm) != 0;
#else
  return false;
#endif
}

}  // namespace muster
