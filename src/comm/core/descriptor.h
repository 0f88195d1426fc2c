// What the ranks tell each other about a collective before they begin it. All must say the same.
//
// Thread-safety: values and pure functions.
#pragma once

#include <chrono>
#include <cstdint>
#include <source_location>
#include <span>
#include <string>
#include <string_view>

#include "comm/core/op_kind.h"

namespace muster::comm {

// Lies in shared memory and in messages, so it has no padding.
struct CallDescriptor {
  uint64_t count = 0;  // elements of the operation's unit: the tensor, or one rank's part; 0 for all_to_all, because
                       // its parts may differ
  uint32_t root = 0;
  OpKind op = OpKind::kNothing;
  uint8_t dtype = 0;                  // c10::ScalarType
  uint8_t redop = 0;                  // ReduceOp
  OpKind part_of = OpKind::kNothing;  // the operation that this one is a part of, if any

  friend bool operator==(const CallDescriptor&, const CallDescriptor&) = default;
};
static_assert(sizeof(CallDescriptor) == 16);

std::string describe(const CallDescriptor& call);                     // "all_reduce of 100 x Float, SUM"
std::string describe(const std::source_location& site);               // "train.cpp:17"; "" if it is not known
void describe(const std::source_location& site, std::span<char> to);  // the same, cut if it does not fit, with '\0'
std::string describe(std::chrono::nanoseconds duration);              // "0.30 s"
// Operations that come through c10d do not know where the user called. If ranks disagree, the finder is asked on the
// thread that runs the operation. Python's module sets it. nullptr: there is no finder.
using SiteFinder = std::string (*)();
void set_site_finder(SiteFinder finder);
std::string find_site(const std::source_location& site);  // describe(site) or, if that is "", what the finder returns
// While it lives, the finder is not asked in this thread, which runs an operation that was called elsewhere.
struct NoSiteFinder {
  NoSiteFinder();
  ~NoSiteFinder();
  NoSiteFinder(const NoSiteFinder&) = delete;
  NoSiteFinder& operator=(const NoSiteFinder&) = delete;
};
// A rank, as users know it, and where it called; "" if that is not known.
struct Caller {
  int rank = 0;
  std::string_view site;
};
struct Payload {
  uint64_t bytes = 0;
  uint8_t dtype = 0;  // another rank may have sent it, so it may be none
};
std::string describe(Payload payload);  // "10 x Float (40 bytes)"
// "operation #3 of group 'world' is not the same on all ranks: rank 0 called barrier (a.cpp:3); rank 1 called …"
std::string describe_mismatch(uint64_t number, const std::string& group, Caller a, const CallDescriptor& a_called,
                              Caller b, const CallDescriptor& b_called);
// "recv on rank 1 (a.cpp:3) expects 10 x Float (40 bytes) with tag 7, but rank 0 (b.cpp:4) sent 5 x Float (20 bytes)"
std::string describe_mismatch(Caller receiver, Payload expected, int tag, Caller sender, Payload sent);
// "all_to_all: rank 0 (a.cpp:3) sends 8 bytes to rank 1 (a.cpp:4), which expects 12"
std::string describe_mismatch(Caller sender, uint64_t sends, Caller receiver, uint64_t expects);
inline constexpr const char* kMismatchAdvice =
    "Call the same operations in the same order, with equal sizes and dtypes, on all ranks";

}  // namespace muster::comm
