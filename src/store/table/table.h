// The keys, values and versions of a store, without threads, waits or sockets.
//
// Versions come from one revision counter for the whole table, so a key's versions grow also when it is erased and set
// again. An erased key leaves a tombstone (its last version), so that a watcher learns that it was erased. Tombstones
// are bounded: beyond kMaxTombstones the oldest are forgotten, and `forgotten_` remembers up to which revision. If a
// key is not in the table, a watcher that has seen a version up to that revision is told that it was erased.
//
// Thread-safety: none; SharedTable adds it.
#pragma once

#include <charconv>
#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "store/kit/quote.h"

namespace muster::store {

class Table {
 public:
  using Versioned = Store::Versioned;
  static constexpr size_t kMaxTombstones = 65'536;

  // nullptr if the key is not in the table and has no tombstone.
  const Versioned* find(std::string_view key) const {
    const auto entry = entries_.find(key);
    return entry == entries_.end() ? nullptr : &entry->second;
  }

  // Value and version if the version of `key` is above `after`.
  std::optional<Versioned> newer(std::string_view key, uint64_t after) const {
    const Versioned* entry = find(key);
    if (entry) return entry->version > after ? std::optional(*entry) : std::nullopt;
    if (after > 0 && after < forgotten_) return Versioned{std::nullopt, forgotten_};
    return std::nullopt;
  }

  void set(std::string_view key, std::string_view value) {
    Versioned& entry = at(key);
    if (!entry.value) ++live_;
    entry.value.emplace(value);
    entry.version = ++revision_;
  }

  int64_t add(std::string_view key, int64_t delta) {
    const Versioned* entry = find(key);
    const int64_t before = entry && entry->value ? number(key, *entry->value) : 0;
    int64_t sum = 0;
    if (__builtin_add_overflow(before, delta, &sum))
      throw InvalidArgument(
          text("adding ", delta, " to the store's key ", quote(key), " overflows its value ", before));
    set(key, std::to_string(sum));
    return sum;
  }

  Store::Exchanged compare_set(std::string_view key, const std::optional<std::string_view>& expected,
                               std::string_view desired) {
    const Versioned* entry = find(key);
    const std::optional<std::string> current = entry ? entry->value : std::nullopt;
    if (current.has_value() != expected.has_value() || (current && *current != *expected)) return {false, current};
    set(key, desired);
    return {true, std::string(desired)};
  }

  bool erase(std::string_view key) {
    const auto entry = entries_.find(key);
    if (entry == entries_.end() || !entry->second.value) return false;
    --live_;
    entry->second = {std::nullopt, ++revision_};
    tombstones_.emplace_back(entry->first, revision_);
    if (tombstones_.size() > kMaxTombstones) forget_oldest();
    return true;
  }

  int64_t num_keys() const { return live_; }
  uint64_t revision() const { return revision_; }

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view key) const { return std::hash<std::string_view>()(key); }
  };

  Versioned& at(std::string_view key) {
    const auto entry = entries_.find(key);
    return entry != entries_.end() ? entry->second : entries_.emplace(std::string(key), Versioned{}).first->second;
  }

  // If a key was set again, it is not a tombstone any more, and only its record here is dropped.
  void forget_oldest() {
    const auto [key, version] = std::move(tombstones_.front());
    tombstones_.pop_front();
    const auto entry = entries_.find(key);
    if (entry == entries_.end() || entry->second.value || entry->second.version != version) return;
    entries_.erase(entry);
    forgotten_ = version;
  }

  static int64_t number(std::string_view key, const std::string& value) {
    int64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    if (error != std::errc() || end != value.data() + value.size())
      throw InvalidArgument(text("cannot add to the store's key ", quote(key), ", which holds ", quote(value)),
                            "Add only to keys that hold a whole number");
    return parsed;
  }

  std::unordered_map<std::string, Versioned, Hash, std::equal_to<>> entries_;
  std::deque<std::pair<std::string, uint64_t>> tombstones_;  // oldest first
  int64_t live_ = 0;
  uint64_t revision_ = 0, forgotten_ = 0;
};

}  // namespace muster::store
