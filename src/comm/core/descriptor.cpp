#include "comm/core/descriptor.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <iomanip>
#include <iterator>

#include "base/text.h"
#include "muster/comm/group.h"

namespace muster {

std::string_view to_string(ReduceOp op) {
  static constexpr std::string_view kNames[] = {"SUM",  "AVG", "PRODUCT", "MIN",       "MAX",
                                                "BAND", "BOR", "BXOR",    "PREMUL_SUM"};
  const auto index = static_cast<size_t>(op);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

namespace comm {

std::string describe(const CallDescriptor& call) {
  std::string words(to_string(call.op));
  if (call.op == OpKind::kBarrier) return words;
  words += text(" of ", call.count, " x ", c10::toString(static_cast<c10::ScalarType>(call.dtype)));
  if (reduces(call.op)) words += text(", ", muster::to_string(static_cast<ReduceOp>(call.redop)));
  if (call.op == OpKind::kBroadcast || call.op == OpKind::kScatter) words += text(", from rank ", call.root);
  if (call.op == OpKind::kReduce || call.op == OpKind::kGather) words += text(", to rank ", call.root);
  if (call.part_of != OpKind::kNothing) words += text(", part of ", to_string(call.part_of));
  return words;
}

std::string describe(const std::source_location& site) {
  char words[256];
  describe(site, words);
  return words;
}

void describe(const std::source_location& site, std::span<char> to) {
  std::string_view file(site.file_name());
  file.remove_prefix(file.find_last_of('/') + 1);
  char line[16];  // ":4294967295"
  line[0] = ':';
  const std::string_view number(line,
                                static_cast<size_t>(std::to_chars(line + 1, std::end(line), site.line()).ptr - line));
  const size_t taken = file.empty() ? 0 : number.size(), room = to.size() - 1 - taken;
  file = file.substr(0, room);
  const auto end = std::copy(file.begin(), file.end(), to.begin());
  *std::copy_n(number.begin(), taken, end) = '\0';
}

namespace {

std::atomic<SiteFinder> site_finder{nullptr};
thread_local int elsewhere = 0;  // NoSiteFinders that live

}  // namespace

NoSiteFinder::NoSiteFinder() { ++elsewhere; }
NoSiteFinder::~NoSiteFinder() { --elsewhere; }

void set_site_finder(SiteFinder finder) { site_finder.store(finder, std::memory_order_release); }

std::string find_site(const std::source_location& site) {
  std::string known = describe(site);
  const SiteFinder finder = site_finder.load(std::memory_order_acquire);
  return known.empty() && finder && elsewhere == 0 ? finder() : known;
}

std::string describe(std::chrono::nanoseconds duration) {
  PlainOutput out;
  out << std::fixed << std::setprecision(2) << std::chrono::duration<double>(duration).count() << " s";
  return std::move(out).str();
}

std::string describe(Payload payload) {
  const auto dtype = static_cast<c10::ScalarType>(payload.dtype);
  if (payload.dtype >= static_cast<uint8_t>(c10::ScalarType::Undefined))
    return text(payload.bytes, " bytes of an unknown dtype");
  return text(payload.bytes / c10::elementSize(dtype), " x ", c10::toString(dtype), " (", payload.bytes, " bytes)");
}

namespace {

std::string in_brackets(std::string_view site) { return site.empty() ? std::string() : text(" (", site, ")"); }

}  // namespace

std::string describe_mismatch(uint64_t number, const std::string& group, Caller a, const CallDescriptor& a_called,
                              Caller b, const CallDescriptor& b_called) {
  return text("operation #", number, " of group '", group, "' is not the same on all ranks: rank ", a.rank, " called ",
              describe(a_called), in_brackets(a.site), "; rank ", b.rank, " called ", describe(b_called),
              in_brackets(b.site));
}

std::string describe_mismatch(Caller receiver, Payload expected, int tag, Caller sender, Payload sent) {
  return text("recv on rank ", receiver.rank, in_brackets(receiver.site), " expects ", describe(expected), " with tag ",
              tag, ", but rank ", sender.rank, in_brackets(sender.site), " sent ", describe(sent));
}

std::string describe_mismatch(Caller sender, uint64_t sends, Caller receiver, uint64_t expects) {
  return text("all_to_all: rank ", sender.rank, in_brackets(sender.site), " sends ", sends, " bytes to rank ",
              receiver.rank, in_brackets(receiver.site), ", which expects ", expects);
}

}  // namespace comm
}  // namespace muster
