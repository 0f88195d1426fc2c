// A Table for many threads, and waiting for what it holds: the one implementation under the memory store, the server's
// local() and the server's sessions.
//
// A wait is a loop over find(want, waiter): either the table holds what is wanted, or the waiter is registered under
// the first key that lacks it and woken once, at that key's next change; then look again. Registering under one key at
// a time keeps a change's cost at the number of those who wait for that very key. A waiter decides itself what waking
// means: a thread's condition variable (wait_for, below) or a message to the server's thread.
//
// Thread-safety: all of it. Waiters are woken after the table's lock is released, on the thread that made the change.
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
#include "store/table.h"

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

  // The error for a wait that ended too late: it names the keys that are not there.
  Timeout timed_out(const Want& want) const;

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
