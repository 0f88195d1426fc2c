#include <utility>

#include "base/env.h"
#include "muster/base/error.h"
#include "muster/store/store.h"
#include "store/kit/erase_all.h"
#include "store/kit/outage.h"

namespace muster {
namespace {

class PrefixStore final : public Store, public store::EraseAll, public store::Outage {
 public:
  PrefixStore(std::shared_ptr<Store> base, std::string prefix)
      : base_(std::move(base)), prefix_(std::move(prefix) + "/") {}

  void set(std::string_view key, std::string_view value) override { base_->set(full(key), value); }
  std::string get(std::string_view key, Deadline deadline) override { return base_->get(full(key), deadline); }
  std::optional<std::string> try_get(std::string_view key) override { return base_->try_get(full(key)); }
  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    std::vector<std::string> full_keys;
    full_keys.reserve(keys.size());
    for (const auto& key : keys) full_keys.push_back(full(key));
    base_->wait(full_keys, deadline);
  }
  int64_t add(std::string_view key, int64_t delta) override { return base_->add(full(key), delta); }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    return base_->compare_set(full(key), expected, desired);
  }
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    return base_->watch(full(key), after, deadline);
  }
  bool erase(std::string_view key) override { return base_->erase(full(key)); }
  int64_t num_keys() override { return base_->num_keys(); }
  void erase_all(std::string_view prefix) override { store::erase_all(*base_, full(prefix)); }
  bool comes_again() const override { return store::comes_again(*base_); }
  void set_call_timeout(std::chrono::milliseconds timeout) override { store::set_call_timeout(*base_, timeout); }

 private:
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  std::shared_ptr<Store> base_;
  std::string prefix_;
};

}  // namespace

std::shared_ptr<Store> make_prefix_store(std::shared_ptr<Store> base, std::string prefix) {
  if (!base) throw InvalidArgument("make_prefix_store needs a store, and was given none");
  return std::make_shared<PrefixStore>(std::move(base), std::move(prefix));
}

std::shared_ptr<Store> connect_job_store(Deadline deadline) {
  const auto address = env_string("MUSTER_STORE");
  if (!address)
    throw InvalidArgument("no launcher told this process of a store (MUSTER_STORE)", "Start it with muster run");
  auto store = connect_store(*address, deadline);
  const auto prefix = env_string("MUSTER_STORE_PREFIX");
  return prefix ? make_prefix_store(std::move(store), *prefix) : store;
}

}  // namespace muster
