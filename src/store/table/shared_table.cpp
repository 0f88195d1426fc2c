#include "store/table/shared_table.h"

#include <algorithm>
#include <condition_variable>
#include <utility>

#include "store/kit/late.h"

namespace muster::store {
namespace {

class ThreadWaiter final : public Waiter {
 public:
  void wake() override {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    changed_.notify_one();
  }
  // Returns whether it was woken before the deadline. The next call waits for the next wake().
  bool wait(Deadline deadline) {
    std::unique_lock lock(mutex_);
    deadline.wait(changed_, lock, [this] { return woken_; });
    return std::exchange(woken_, false);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool woken_ = false;
};

}  // namespace

// Runs `make` under the lock. If that has changed the table, wakes the waiters of `key`.
template <typename Change>
auto SharedTable::change(std::string_view key, Change&& make) {
  Waiters woken;
  std::unique_lock lock(mutex_);
  const uint64_t before = table_.revision();
  auto result = make(table_);
  if (table_.revision() != before && !waiting_.empty()) {
    if (const auto waiters = waiting_.find(std::string(key)); waiters != waiting_.end()) {
      woken = std::move(waiters->second);
      waiting_.erase(waiters);
      for (const auto& waiter : woken) waiter->registered_under_.reset();
    }
  }
  lock.unlock();
  for (const auto& waiter : woken) waiter->wake();
  return result;
}

void SharedTable::set(std::string_view key, std::string_view value) {
  change(key, [&](Table& table) {
    table.set(key, value);
    return true;
  });
}

std::optional<std::string> SharedTable::try_get(std::string_view key) const {
  std::lock_guard lock(mutex_);
  const Versioned* entry = table_.find(key);
  return entry ? entry->value : std::nullopt;
}

int64_t SharedTable::add(std::string_view key, int64_t delta) {
  return change(key, [&](Table& table) { return table.add(key, delta); });
}

Store::Exchanged SharedTable::compare_set(std::string_view key, const std::optional<std::string_view>& expected,
                                          std::string_view desired) {
  return change(key, [&](Table& table) { return table.compare_set(key, expected, desired); });
}

bool SharedTable::erase(std::string_view key) {
  return change(key, [&](Table& table) { return table.erase(key); });
}

int64_t SharedTable::num_keys() const {
  std::lock_guard lock(mutex_);
  return table_.num_keys();
}

size_t SharedTable::num_waiting() const {
  std::lock_guard lock(mutex_);
  size_t count = 0;
  for (const auto& [key, waiters] : waiting_) count += waiters.size();
  return count;
}

// Returns true if the table does not hold what `want` asks of this key. Otherwise, if `found` is not null, stores the
// key's value and version there.
bool SharedTable::lacks(const Want& want, const std::string& key, std::optional<Versioned>* found) const {
  if (want.above) {
    auto newer = table_.newer(key, *want.above);
    const bool lacking = !newer;
    if (found) *found = std::move(newer);
    return lacking;
  }
  const Versioned* entry = table_.find(key);
  if (!entry || !entry->value) return true;
  if (found) *found = *entry;
  return false;
}

std::optional<SharedTable::Versioned> SharedTable::find(const Want& want, const std::shared_ptr<Waiter>& waiter) {
  std::lock_guard lock(mutex_);
  std::optional<Versioned> found{std::in_place};
  for (size_t i = 0; i < want.keys.size(); ++i) {
    const std::string& key = want.keys[i];
    const bool last = i + 1 == want.keys.size();
    if (!lacks(want, key, last ? &found : nullptr)) continue;
    if (waiter && waiter->registered_under_ != key) {
      forget_locked(*waiter);
      waiting_[key].push_back(waiter);
      waiter->registered_under_ = key;
    }
    return std::nullopt;
  }
  return found;
}

void SharedTable::forget(Waiter& waiter) {
  std::lock_guard lock(mutex_);
  forget_locked(waiter);
}

void SharedTable::forget_locked(Waiter& waiter) {
  if (!waiter.registered_under_) return;
  const auto entry = waiting_.find(*waiter.registered_under_);
  waiter.registered_under_.reset();
  if (entry == waiting_.end()) return;
  std::erase_if(entry->second, [&](const std::shared_ptr<Waiter>& other) { return other.get() == &waiter; });
  if (entry->second.empty()) waiting_.erase(entry);
}

SharedTable::Versioned SharedTable::wait_for(const Want& want, Deadline deadline) {
  if (auto found = find(want, nullptr)) return *std::move(found);
  const auto waiter = std::make_shared<ThreadWaiter>();
  for (;;) {
    if (auto found = find(want, waiter)) {
      forget(*waiter);
      return *std::move(found);
    }
    if (waiter->wait(deadline)) continue;
    forget(*waiter);
    if (auto found = find(want, nullptr)) return *std::move(found);  // it was set just before the deadline
    throw timed_out(want);
  }
}

TimeoutError SharedTable::timed_out(const Want& want) const {
  if (want.above) return did_not_change(want.keys.at(0));
  std::vector<std::string> missing;
  {
    std::lock_guard lock(mutex_);
    for (const auto& key : want.keys)
      if (lacks(want, key, nullptr)) missing.push_back(key);
  }
  return nobody_set(missing);
}

}  // namespace muster::store
