// A Table for many threads, with waits for its keys. The memory store, the server's local() and the server's sessions
// all use it.
//
// A wait is a loop over find(want, waiter): either the table holds all that is wanted, or the waiter is registered
// under the first key that is missing and is woken once, at that key's next change; then it looks again. A waiter is
// registered under one key at a time, so a change wakes only the waiters of its own key. A waiter decides what waking
// means: a thread's condition variable (wait_for, below) or a message to the server's thread.
//
// Thread-safety: all methods. Waiters are woken after the table's lock is released, on the thread that made the change.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "muster/base/deadline.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "store/table/table.h"

namespace muster::store {

class Waiter {
 public:
  virtual ~Waiter() = default;
  virtual void wake() = 0;

 private:
  friend class SharedTable;
  std::optional<std::string> registered_under_;  // guarded by the table's mutex
};

// What a wait is for: every key of `keys` has a value, or, with `above`, the version of the only key is above that.
struct Want {
  std::vector<std::string> keys;
  std::optional<uint64_t> above;
};

class SharedTable {
 public:
  using Versioned = Store::Versioned;

  void set(std::string_view key, std::string_view value);
  std::optional<std::string> try_get(std::string_view key) const;
  int64_t add(std::string_view key, int64_t delta);
  Store::Exchanged compare_set(std::string_view key, const std::optional<std::string_view>& expected,
                               std::string_view desired);
  bool erase(std::string_view key);
  int64_t num_keys() const;

  // The last wanted key's value and version, if the table holds all that is wanted. Else nullopt, and `waiter` (may be
  // null) is registered. A waiter stays registered until woken or forgotten.
  std::optional<Versioned> find(const Want& want, const std::shared_ptr<Waiter>& waiter);
  void forget(Waiter& waiter);

  // Blocks the calling thread.
  Versioned wait_for(const Want& want, Deadline deadline);

  // How many waiters are registered.
  size_t num_waiting() const;

  // The error of a wait whose deadline has passed: it names the missing keys.
  TimeoutError timed_out(const Want& want) const;

 private:
  using Waiters = std::vector<std::shared_ptr<Waiter>>;

  template <typename Change>
  auto change(std::string_view key, Change&& make);
  bool lacks(const Want& want, const std::string& key, std::optional<Versioned>* found) const;
  void forget_locked(Waiter& waiter);

  mutable std::mutex mutex_;
  Table table_;
  std::unordered_map<std::string, Waiters> waiting_;  // by key; no empty vectors
};

}  // namespace muster::store
