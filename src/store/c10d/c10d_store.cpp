#include "muster/store/c10d_store.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <unordered_map>
#include <utility>

#include "base/random.h"
#include "base/text.h"
#include "base/thread.h"
#include "muster/base/error.h"
#include "store/kit/outage.h"
#include "store/kit/quote.h"

namespace muster {
namespace {

using Bytes = std::vector<uint8_t>;
using std::chrono::milliseconds;

Bytes to_bytes(std::string_view string) { return {string.begin(), string.end()}; }
std::string to_string(const Bytes& bytes) { return {bytes.begin(), bytes.end()}; }

// --- A c10d::Store as a Store ---

// compare_set() first stores a value in an envelope, which consists of a mark, a token and the value. The token tells
// whether this call or another one has stored it.
constexpr std::string_view kMark = "\x01muster-compare-set\x01";
constexpr size_t kTokenBytes = 16;

std::string envelope(std::string_view value) {
  return std::string(kMark) + random_hex(kTokenBytes) + std::string(value);
}

std::string open_envelope(std::string raw) {
  constexpr size_t kHead = kMark.size() + 2 * kTokenBytes;
  return raw.size() >= kHead && raw.starts_with(kMark) ? raw.substr(kHead) : raw;
}

// Runs `call` by this thread's deadline for calls, if there is one (store/kit/outage.h). c10d's calls take no deadline,
// so `call` then runs in a separate thread, which is left running if `call` does not return in time. Therefore `call`
// must own what it uses.
template <typename Call>
auto run_in_time(Call call) {
  const Deadline deadline = store::CallsBy::of_this_thread();
  if (deadline.is_never()) return call();
  const auto task = std::make_shared<std::packaged_task<decltype(call())()>>(std::move(call));
  auto result = task->get_future();
  start_thread("muster-c10d", [task] { (*task)(); }).detach();
  if (result.wait_until(deadline.when()) == std::future_status::timeout)
    throw TimeoutError("the c10d store does not answer");
  return result.get();
}

// Runs `call` as run_in_time() does, and converts what c10d throws into a Muster error.
template <typename Call>
auto translated(std::string_view what, Call&& call) {
  try {
    return run_in_time(std::forward<Call>(call));
  } catch (const Error&) {
    throw;
  } catch (const c10::DistStoreError& error) {
    throw TimeoutError(text("the c10d store did not ", what, " in time: ", error.msg()));
  } catch (const c10::Error& error) {
    throw Unavailable(text("the c10d store could not ", what, ": ", error.msg()),
                      "The process that serves it (torchrun, or rank 0) may have ended");
  } catch (const std::exception& error) {
    throw Unavailable(text("the c10d store could not ", what, ": ", error.what()));
  }
}

class FromC10d final : public Store {
 public:
  explicit FromC10d(c10::intrusive_ptr<c10d::Store> base) : base_(std::move(base)) {}

  void set(std::string_view key, std::string_view value) override {
    const std::string name(key);
    translated("set a key", [base = base_, name, bytes = to_bytes(value)] {
      base->set(name, bytes);
      // TCPStore's set() only sends. Its server answers in order, so when it answers check(), the value is set.
      base->check({name});
    });
    note(name, std::string(value));
  }

  std::string get(std::string_view key, Deadline deadline) override {
    const std::string name(key);
    std::optional<std::string> value;
    if (!poll(deadline, [&] { return (value = look(name)).has_value(); })) throw_missing({name});
    return *std::move(value);
  }

  std::optional<std::string> try_get(std::string_view key) override { return look(std::string(key)); }

  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    const auto all_there = [&] {
      return keys.empty() || translated("check its keys", [base = base_, keys] { return base->check(keys); });
    };
    if (!poll(deadline, all_there)) throw_missing(keys);
  }

  int64_t add(std::string_view key, int64_t delta) override {
    const std::string name(key);
    if (const auto raw = look_raw(name)) {
      const std::string value = open_envelope(*raw);
      require_number(name, value, delta);
      if (value != *raw) exchange(name, *raw, value);  // completes another call's compare_set()
    }
    const int64_t sum = translated("add to a key", [base = base_, name, delta] { return base->add(name, delta); });
    note(name, std::to_string(sum));
    return sum;
  }

  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    const std::string name(key), mine = envelope(desired);
    if (!expected || expected->empty()) {  // for c10d, "absent" and "empty" are the same
      auto current = look(name);
      if (current != expected) return {false, std::move(current)};
    }
    std::string asked = expected.value_or("");
    for (;;) {
      const std::string raw = exchange(name, asked, mine);
      if (raw == mine) {
        exchange(name, mine, std::string(desired));
        note(name, std::string(desired));
        return {true, std::string(desired)};
      }
      if (raw == asked && expected) return {false, std::nullopt};  // c10d's answer if the key is absent
      std::string value = open_envelope(raw);
      if (value != expected) return {false, std::move(value)};
      asked = raw;  // the expected value, but in an envelope, or just taken out of one
    }
  }

  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    const std::string name(key);
    Versioned result;
    const auto is_newer = [&] {
      result = observe(name);
      return result.version > after;
    };
    if (!poll(deadline, is_newer))
      throw TimeoutError(text("the store's key ", store::quote(name), " did not change in time"));
    return result;
  }

  bool erase(std::string_view key) override {
    const std::string name(key);
    // Looks first, because FileStore returns true for any key.
    const bool erased =
        translated("erase a key", [base = base_, name] { return base->check({name}) && base->deleteKey(name); });
    if (erased) note(name, std::nullopt);
    return erased;
  }

  int64_t num_keys() override {
    return translated("count its keys", [base = base_] { return base->getNumKeys(); });
  }

 private:
  // Whether `condition` came true before the deadline. It is tried at least once.
  template <typename Condition>
  static bool poll(Deadline deadline, Condition&& condition) {
    using std::chrono::nanoseconds;
    const auto start = Clock::now();
    for (;;) {
      if (condition()) return true;
      if (deadline.passed()) return false;
      const nanoseconds pause = std::clamp<nanoseconds>((Clock::now() - start) / 8, milliseconds(1), milliseconds(50));
      std::this_thread::sleep_for(std::min(pause, deadline.left()));
    }
  }

  std::string exchange(const std::string& key, const std::string& expected, const std::string& desired) {
    return translated("compare and set a key", [base = base_, key, old = to_bytes(expected), now = to_bytes(desired)] {
      return to_string(base->compareSet(key, old, now));
    });
  }

  // Reads a key with a compareSet() that cannot succeed. It returns immediately: the key's value, or, if the key is
  // absent, the expected value. c10d's get() would wait for an absent key, also if the key is erased after a check().
  std::optional<std::string> look_raw(const std::string& key) {
    const std::string nobodys = envelope("");
    std::string raw = exchange(key, nobodys, nobodys);
    return raw == nobodys ? std::nullopt : std::optional(std::move(raw));
  }

  std::optional<std::string> look(const std::string& key) {
    auto raw = look_raw(key);
    return raw ? std::optional(open_envelope(*std::move(raw))) : std::nullopt;
  }

  static void require_number(const std::string& key, const std::string& value, int64_t delta) {
    int64_t number = 0, sum = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
    if (error != std::errc() || end != value.data() + value.size())
      throw InvalidArgument(
          text("cannot add to the store's key ", store::quote(key), ", which holds ", store::quote(value)),
          "Add only to keys that hold a whole number");
    if (__builtin_add_overflow(number, delta, &sum))
      throw InvalidArgument(text("adding ", delta, " to the store's key ", store::quote(key), " overflows ", number));
  }

  [[noreturn]] void throw_missing(const std::vector<std::string>& keys) {
    std::vector<std::string> missing;
    for (const auto& key : keys)
      if (!translated("check a key", [base = base_, key] { return base->check({key}); }))
        missing.push_back(store::quote(key));
    throw TimeoutError(text("nobody set the store's key ", join(missing), " in time"), {},
                       "A rank that sets it may have failed or not have started; look at its output");
  }

  // Reads a watched key and returns its value and version. If note() has noted a change by this bridge meanwhile, the
  // value that was read may be older, and is ignored.
  Versioned observe(const std::string& key) {
    std::unique_lock lock(mutex_);
    const uint64_t before = watched_[key].version;
    lock.unlock();
    auto value = look(key);
    lock.lock();
    Versioned& entry = watched_[key];
    if (entry.version == before && entry.value != value) entry = {std::move(value), before + 1};
    return entry;
  }

  // Notes a change that this bridge made.
  void note(const std::string& key, std::optional<std::string> value) {
    std::lock_guard lock(mutex_);
    const auto entry = watched_.find(key);
    if (entry != watched_.end()) entry->second = {std::move(value), entry->second.version + 1};
  }

  c10::intrusive_ptr<c10d::Store> base_;
  std::mutex mutex_;
  std::unordered_map<std::string, Versioned> watched_;
};

// --- A Store as a c10d::Store ---

// Runs `call`, and converts Muster's errors into those that c10d's users expect.
template <typename Call>
auto as_c10d(Call&& call) {
  try {
    return call();
  } catch (const TimeoutError& error) {
    C10_THROW_ERROR(DistStoreError, error.what());
  } catch (const Unavailable& error) {
    C10_THROW_ERROR(DistNetworkError, error.what());
  } catch (const InvalidArgument& error) {
    C10_THROW_ERROR(ValueError, error.what());
  } catch (const Error& error) {
    C10_THROW_ERROR(DistError, error.what());
  }
}

Deadline deadline_in(milliseconds timeout) {
  return timeout == c10d::Store::kNoTimeout ? Deadline::never() : Deadline::after(timeout);
}

class ToC10d final : public c10d::Store {
 public:
  ToC10d(std::shared_ptr<muster::Store> base, milliseconds timeout) : c10d::Store(timeout), base_(std::move(base)) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<ToC10d>(base_, timeout_); }

  void set(const std::string& key, const Bytes& value) override {
    as_c10d([&] { base_->set(key, to_string(value)); });
  }

  Bytes compareSet(const std::string& key, const Bytes& expected_bytes, const Bytes& desired_bytes) override {
    const std::string expected = to_string(expected_bytes), desired = to_string(desired_bytes);
    return as_c10d([&]() -> Bytes {
      auto result = base_->compare_set(key, expected.empty() ? std::nullopt : std::optional(expected), desired);
      // In c10d an empty expected value matches an absent key, and also a key with an empty value.
      if (!result.stored && expected.empty() && result.value == "") result = base_->compare_set(key, "", desired);
      return to_bytes(result.value.value_or(expected));
    });
  }

  Bytes get(const std::string& key) override {
    return as_c10d([&] { return to_bytes(base_->get(key, deadline_in(timeout_))); });
  }

  int64_t add(const std::string& key, int64_t value) override {
    return as_c10d([&] { return base_->add(key, value); });
  }

  bool deleteKey(const std::string& key) override {
    return as_c10d([&] { return base_->erase(key); });
  }

  bool check(const std::vector<std::string>& keys) override {
    return as_c10d([&] {
      return std::all_of(keys.begin(), keys.end(), [&](const auto& key) { return base_->try_get(key).has_value(); });
    });
  }

  int64_t getNumKeys() override {
    return as_c10d([&] { return base_->num_keys(); });
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const milliseconds& timeout) override {
    as_c10d([&] { base_->wait(keys, deadline_in(timeout)); });
  }

  void append(const std::string& key, const Bytes& value) override {
    as_c10d([&] {
      const std::string more = to_string(value);
      auto seen = base_->try_get(key);
      for (;;) {
        auto result = base_->compare_set(key, seen, seen.value_or("") + more);
        if (result.stored) return;
        seen = std::move(result.value);
      }
    });
  }

  std::vector<Bytes> multiGet(const std::vector<std::string>& keys) override {
    wait(keys, timeout_);
    std::vector<Bytes> values;
    values.reserve(keys.size());
    for (const auto& key : keys) values.push_back(get(key));
    return values;
  }

  void multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) override {
    if (keys.size() != values.size())
      C10_THROW_ERROR(ValueError, text("multiSet of ", keys.size(), " keys and ", values.size(), " values"));
    for (size_t i = 0; i < keys.size(); ++i) set(keys[i], values[i]);
  }

  bool hasExtendedApi() const override { return true; }

 private:
  std::shared_ptr<muster::Store> base_;
};

}  // namespace

std::shared_ptr<Store> from_c10d(c10::intrusive_ptr<c10d::Store> store) {
  if (!store) throw InvalidArgument("from_c10d needs a store, and was given none");
  return std::make_shared<FromC10d>(std::move(store));
}

c10::intrusive_ptr<c10d::Store> to_c10d(std::shared_ptr<Store> store) {
  if (!store) throw InvalidArgument("to_c10d needs a store, and was given none");
  return c10::make_intrusive<ToC10d>(std::move(store), c10d::Store::kDefaultTimeout);
}

}  // namespace muster
