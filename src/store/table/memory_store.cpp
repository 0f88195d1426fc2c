#include <utility>

#include "store/table/local_store.h"

namespace muster {
namespace store {
namespace {

class LocalStore final : public Store {
 public:
  explicit LocalStore(std::shared_ptr<SharedTable> table) : table_(std::move(table)) {}

  void set(std::string_view key, std::string_view value) override { table_->set(key, value); }
  std::string get(std::string_view key, Deadline deadline) override {
    return *table_->wait_for({{std::string(key)}, std::nullopt}, deadline).value;
  }
  std::optional<std::string> try_get(std::string_view key) override { return table_->try_get(key); }
  void wait(const std::vector<std::string>& keys, Deadline deadline) override {
    table_->wait_for({keys, std::nullopt}, deadline);
  }
  int64_t add(std::string_view key, int64_t delta) override { return table_->add(key, delta); }
  Exchanged compare_set(std::string_view key, const std::optional<std::string>& expected,
                        std::string_view desired) override {
    return table_->compare_set(key, expected, desired);
  }
  Versioned watch(std::string_view key, uint64_t after, Deadline deadline) override {
    return table_->wait_for({{std::string(key)}, after}, deadline);
  }
  bool erase(std::string_view key) override { return table_->erase(key); }
  int64_t num_keys() override { return table_->num_keys(); }

 private:
  std::shared_ptr<SharedTable> table_;
};

}  // namespace

std::shared_ptr<Store> make_local_store(std::shared_ptr<SharedTable> table) {
  return std::make_shared<LocalStore>(std::move(table));
}

}  // namespace store

std::shared_ptr<Store> make_memory_store() { return store::make_local_store(std::make_shared<store::SharedTable>()); }

}  // namespace muster
