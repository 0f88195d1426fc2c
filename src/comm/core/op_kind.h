// The operations that a backend knows, and their names in messages.
#pragma once

#include <cstdint>
#include <string_view>

namespace muster::comm {

enum class OpKind : uint8_t {
  kNothing,
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kGather,
  kScatter,
  kAllToAll,
  kBarrier,
  kSend,
  kRecv,
  kAllReduceSparse,
  kScan,
};

inline constexpr std::string_view kOpNames[] = {
    "nothing", "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter",    "gather",
    "scatter", "all_to_all", "barrier",   "send",   "recv",       "sparse all_reduce", "scan"};

// "?" for a number that is not an OpKind; torn or foreign memory may hold one.
constexpr std::string_view to_string(OpKind kind) {
  const auto index = static_cast<size_t>(kind);
  return index < std::size(kOpNames) ? kOpNames[index] : "?";
}

constexpr bool reduces(OpKind kind) {
  return kind == OpKind::kAllReduce || kind == OpKind::kReduce || kind == OpKind::kReduceScatter ||
         kind == OpKind::kScan;
}
constexpr bool is_message(OpKind kind) { return kind == OpKind::kSend || kind == OpKind::kRecv; }

}  // namespace muster::comm
