#include "checkpoint/items.h"

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/text.h"
#include "checkpoint/item_values.h"
#include "muster/base/error.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::checkpoint {
namespace {

class ModuleItem final : public Item {
 public:
  explicit ModuleItem(torch::nn::Module& module) : module_(module) {}

  Entries save() override {
    Entries entries;
    for (const auto& [name, kind, tensor] : tensors()) {
      Entry entry{.name = name, .kind = kind, .order = static_cast<int64_t>(entries.size())};
      if (parallel::is_spread(tensor)) entry.only = parallel::sharing_of(tensor)->owner;
      if (entry.only == kEveryRank)
        entry.tensor = storable(tensor, name);
      else if (parallel::belongs_to_another_rank(tensor))
        entry.tensor = without_values(tensor);
      else
        entry.tensor = storable(parallel::unwatched(tensor), name);
      entries.push_back(std::move(entry));
    }
    return entries;
  }

  std::vector<Need> needs(const Entries& entries) const override {
    const auto here = tensors_by_name();
    std::vector<Need> needs(entries.size());
    for (size_t i = 0; i < entries.size(); ++i)
      if (const auto found = here.find(key_of(entries[i])); found != here.end()) needs[i] = need_of(found->second);
    return needs;
  }

  void check(const Entries& entries) const override {
    const auto here = tensors();
    for (size_t i = 0; i < std::max(entries.size(), here.size()); ++i) {
      if (i < entries.size() && i < here.size() && entries[i].name == here[i].name && entries[i].kind == here[i].kind) {
        check_fits(entries[i], here[i].tensor);
      } else if (i < entries.size()) {
        throw InvalidArgument(
            text("the snapshot has a ", entries[i].kind, " '", entries[i].full_name(), "' where the module has ",
                 i < here.size() ? text("the ", here[i].kind, " '", here[i].name, "'") : "none"),
            kSameProgram);
      } else {
        throw InvalidArgument(text("the module has a ", here[i].kind, " '", here[i].name, "' that the snapshot lacks"),
                              kSameProgram);
      }
    }
  }

  std::function<bool(const Entry&)> accepts() const override {
    return [here = tensors_by_name()](const Entry& entry) { return here.contains(key_of(entry)); };
  }
  void check_part(const Entries& entries) const override {
    const auto here = tensors_by_name();
    for (const Entry& entry : entries) check_fits(entry, here.at(key_of(entry)));
  }
  std::vector<std::string> lacking(const Entries& entries) const override {
    std::set<Key> there;
    for (const Entry& entry : entries) there.insert(key_of(entry));
    std::vector<std::string> names;
    for (const auto& each : tensors())
      if (!there.contains({each.kind, each.name})) names.push_back(each.name);
    return names;
  }

  bool comes_in_parts(const Entry&) const override { return true; }
  void load(const Entries&) override { by_name_ = tensors_by_name(); }
  at::Tensor memory_for(const Entry& entry) override {
    const at::Tensor& here = by_name_.at(key_of(entry));
    if (parallel::belongs_to_another_rank(here)) return {};
    at::Tensor memory = parallel::unwatched(here).detach();
    return takes_bytes_of(entry.tensor, memory) ? memory : at::Tensor();
  }
  void load_part(const Entries& entries) override {
    for (const Entry& entry : entries) {
      const at::Tensor& here = by_name_.at(key_of(entry));
      if (entry.in_place)
        torch::autograd::impl::bump_version(here);
      else
        put_values(here, entry.tensor);
    }
  }
  std::string what_is_equal(bool) const override { return join(spread_over()); }
  std::set<int> spread_over() const override {
    std::set<int> ranks;
    for (const auto& each : tensors())
      if (parallel::is_spread(each.tensor)) ranks.insert(parallel::sharing_of(each.tensor)->owner);
    return ranks;
  }

 private:
  struct Named {
    std::string name;
    const char* kind;
    at::Tensor tensor;
  };
  std::vector<Named> tensors() const {
    std::vector<Named> all;
    const auto add = [&](const auto& named, const char* kind) {
      for (const auto& each : named)
        if (each.value().defined()) all.push_back({each.key(), kind, each.value()});
    };
    add(module_.named_parameters(), "parameter");
    add(module_.named_buffers(), "buffer");
    return all;
  }
  using Key = std::pair<std::string, std::string>;  // a buffer may have the name of a parameter
  static Key key_of(const Entry& entry) { return {entry.kind, entry.name}; }
  std::map<Key, at::Tensor> tensors_by_name() const {
    std::map<Key, at::Tensor> all;
    for (auto& each : tensors()) all.emplace(Key(each.kind, each.name), each.tensor);
    return all;
  }

  torch::nn::Module& module_;
  std::map<Key, at::Tensor> by_name_;  // since load()
};

class ArchiveItem final : public Item {
 public:
  ArchiveItem(SaveFn save, LoadFn load) : save_(std::move(save)), load_(std::move(load)) {}
  Entries save() override { return save_archive(save_); }
  void load(const Entries& entries) override { load_archive(entries, load_); }
  Refusal refusal() const override { return Refusal::kLikely; }

 private:
  SaveFn save_;
  LoadFn load_;
};

class GeneratorItem final : public Item {
 public:
  explicit GeneratorItem(at::Generator generator) : generator_(std::move(generator)) {}

  Entries save() override {
    const std::lock_guard lock(generator_.mutex());
    return {{.name = "state", .kind = "tensor", .tensor = storable(generator_.get_state(), "state")}};
  }
  void check(const Entries& entries) const override {
    check_count(entries, 1);
    at::Generator trial = generator_.clone();  // set_state() refuses bytes that are not a state
    trial.set_state(entries[0].tensor.clone());
  }
  void load(const Entries& entries) override {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(entries[0].tensor.clone());
  }

 private:
  at::Generator generator_;
};

class TensorItem final : public Item {
 public:
  explicit TensorItem(at::Tensor& tensor) : tensor_(tensor) {}
  Entries save() override {
    if (!tensor_.defined()) throw InvalidArgument("cannot save an undefined tensor", "Give it a value first");
    return {{.kind = "tensor", .tensor = storable(tensor_, "")}};
  }
  void check(const Entries& entries) const override {
    check_count(entries, 1);
    check_fits(entries[0], tensor_);
  }
  void load(const Entries& entries) override { copy_values(tensor_, entries[0].tensor); }

 private:
  at::Tensor& tensor_;
};

class NumberItem final : public Item {
 public:
  NumberItem(void* number, at::ScalarType dtype) : number_(at::from_blob(number, {}, dtype)) {}
  Entries save() override { return {{.kind = "number", .tensor = number_}}; }
  void check(const Entries& entries) const override {
    check_count(entries, 1);
    check_fits(entries[0], number_);
  }
  void load(const Entries& entries) override { copy_values(number_, entries[0].tensor); }

 private:
  at::Tensor number_;  // in the number's memory
};

class StringItem final : public Item {
 public:
  explicit StringItem(std::string& string) : string_(string) {}
  Entries save() override {
    return {
        {.kind = "string", .tensor = at::from_blob(string_.data(), {static_cast<int64_t>(string_.size())}, at::kByte)}};
  }
  void check(const Entries& entries) const override {
    check_count(entries, 1);
    const at::Tensor& saved = entries[0].tensor;
    if (saved.scalar_type() != at::kByte || saved.dim() != 1)
      throw InvalidArgument(
          text("'", entries[0].full_name(), "' in the snapshot: expected a string, as here, got ", shape_of(saved)),
          kSameProgram);
  }
  void load(const Entries& entries) override {
    const at::Tensor& saved = entries[0].tensor;
    string_.assign(saved.numel() > 0 ? reinterpret_cast<const char*>(saved.const_data_ptr()) : "", saved.nbytes());
  }

 private:
  std::string& string_;
};

// The first entry holds the map's size, because a map may be empty.
template <typename T>
class NumbersItem final : public Item {
 public:
  explicit NumbersItem(std::map<std::string, T>& numbers) : numbers_(numbers) {}
  Entries save() override {
    Entries entries{{.kind = "map", .tensor = tensor_of(static_cast<int64_t>(numbers_.size()))}};
    for (const auto& [name, number] : numbers_)
      entries.push_back(
          {.name = name, .kind = "number", .order = static_cast<int64_t>(entries.size()), .tensor = tensor_of(number)});
    return entries;
  }
  void check(const Entries& entries) const override { read(entries); }
  void load(const Entries& entries) override { numbers_ = read(entries); }

 private:
  static std::map<std::string, T> read(const Entries& entries) {
    check_count(entries, static_cast<size_t>(number_in<int64_t>(entries[0])) + 1);
    std::map<std::string, T> numbers;
    for (size_t i = 1; i < entries.size(); ++i) numbers[entries[i].name] = number_in<T>(entries[i]);
    return numbers;
  }
  std::map<std::string, T>& numbers_;
};

}  // namespace

Need need_of(const at::Tensor& parameter) {
  const auto* const sharing = parallel::sharing_of(parameter);
  if (!sharing) return {};
  return {.owner = sharing->owner, .is_only_owner = sharing->is_only_owner, .here = sharing->is_own};
}

std::unique_ptr<Item> make_item(torch::nn::Module& module) { return std::make_unique<ModuleItem>(module); }
std::unique_ptr<Item> make_item(at::Generator generator) {
  return std::make_unique<GeneratorItem>(std::move(generator));
}
std::unique_ptr<Item> make_item(at::Tensor& tensor) { return std::make_unique<TensorItem>(tensor); }
std::unique_ptr<Item> make_item(void* number, at::ScalarType dtype) {
  return std::make_unique<NumberItem>(number, dtype);
}
std::unique_ptr<Item> make_item(std::string& string) { return std::make_unique<StringItem>(string); }
std::unique_ptr<Item> make_item(std::map<std::string, int64_t>& numbers) {
  return std::make_unique<NumbersItem<int64_t>>(numbers);
}
std::unique_ptr<Item> make_item(std::map<std::string, double>& numbers) {
  return std::make_unique<NumbersItem<double>>(numbers);
}
std::unique_ptr<Item> make_item(SaveFn save, LoadFn load) {
  return std::make_unique<ArchiveItem>(std::move(save), std::move(load));
}

}  // namespace muster::checkpoint
