// A store that may be unreachable for a while and come back with its data (an etcd): an operation that gets no answer
// is tried again, for as long as its user tolerates that.
//
// A wait that ends with TimeoutError is not tried again: the store answered, and the key was not there. An operation
// that is tried again may have taken effect before. set() has the same effect twice, and so has compare_set() with a
// value that only one writer writes; add() may count twice, which its caller must tolerate.
//
// Thread-safety: as the store's, if `bears` and `heard` are thread-safe.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "muster/store/store.h"
#include "store/kit/erase_all.h"

namespace muster::launch {

class PatientStore final : public Store, public store::EraseAll {
 public:
  // `bears`: asked each time the store was silent; false lets the error out. `heard`: called each time it answered.
  PatientStore(std::shared_ptr<Store> store, std::function<bool(const Error&)> bears, std::function<void()> heard)
      : store_(std::move(store)), bears_(std::move(bears)), heard_(std::move(heard)) {}

  void set(std::string_view key, std::string_view value) override {
    insist([&] { return store_->set(key, value), 0; });
  }
  std::string get(std::string_view key, Deadline deadline) override {
    return insist([&] { return store_->get(key, deadline); });
  }
  std::optional<std::string> try_get(std::string_view key) override {
    return insist([&] { return store_->try_get(key); });
  }
  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    insist([&] { return store_->wait(keys, deadline), 0; });
  }
  int64_t add(std::string_view key, int64_t delta) override {
    return insist([&] { return store_->add(key, delta); });
  }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    return insist([&] { return store_->compare_set(key, expected, desired); });
  }
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    return insist([&] { return store_->watch(key, after, deadline); });
  }
  bool erase(std::string_view key) override {
    return insist([&] { return store_->erase(key); });
  }
  void erase_all(std::string_view prefix) override {
    insist([&] { return store::erase_all(*store_, prefix); });
  }
  int64_t num_keys() override {
    return insist([&] { return store_->num_keys(); });
  }

 private:
  template <typename Call>
  auto insist(Call call) -> decltype(call()) {
    for (;;) {
      try {
        auto result = call();
        heard_();
        return result;
      } catch (const TimeoutError&) {
        heard_();
        throw;
      } catch (const Unavailable& error) {
        if (!bears_(error)) throw;
        ::poll(nullptr, 0, kPause);
      }
    }
  }

  static constexpr int kPause = 10;  // milliseconds, for a store that refuses quickly

  const std::shared_ptr<Store> store_;
  const std::function<bool(const Error&)> bears_;
  const std::function<void()> heard_;
};

}  // namespace muster::launch
