// A store that hands every call to another: the base of those that a test makes fail or wait.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "muster/store/store.h"

namespace muster::test {

class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value) override { here().set(key, value); }
  std::string get(std::string_view key, Deadline deadline) override { return here().get(key, deadline); }
  std::optional<std::string> try_get(std::string_view key) override { return here().try_get(key); }
  void wait(const std::vector<std::string>& keys, Deadline deadline) override { here().wait(keys, deadline); }
  int64_t add(std::string_view key, int64_t delta) override { return here().add(key, delta); }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    return here().compare_set(key, expected, desired);
  }
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    return here().watch(key, after, deadline);
  }
  bool erase(std::string_view key) override { return here().erase(key); }
  int64_t num_keys() override { return here().num_keys(); }

 protected:
  virtual Store& here() const { return *store_; }  // asked by every call

 private:
  const std::shared_ptr<Store> store_;
};

}  // namespace muster::test
