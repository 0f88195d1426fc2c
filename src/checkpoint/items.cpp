#include "checkpoint/items.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <mutex>
#include <set>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "muster/base/error.h"
#include "parallel/shared_tensor.h"
#include "parallel/watched.h"

namespace muster::checkpoint {
namespace {

// The tensor in a form that a file can hold: dense, contiguous, on the CPU. Shares the tensor's memory if it can.
at::Tensor storable(const at::Tensor& tensor, const std::string& name) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    throw InvalidArgument(text("tensor '", name, "' is sparse, quantized or without data"),
                          "Snapshots hold dense tensors; add it as an object with save() and load()");
  // A parameter whose values may be elsewhere: clone() throws if they are.
  const at::Tensor values = parallel::is_watched(tensor) ? tensor.detach().clone() : tensor.detach();
  return values.to(at::kCPU).contiguous().resolve_conj().resolve_neg();
}

std::string shape_of(const at::Tensor& tensor) {
  return text(c10::toString(tensor.scalar_type()), " [", join(tensor.sizes(), " x "), "]");
}

constexpr const char* kSameProgram = "Restore with the program that saved, or name another folder";

void check_fits(const Entry& saved, const at::Tensor& here) {
  if (saved.tensor.sizes() != here.sizes() || saved.tensor.scalar_type() != here.scalar_type())
    throw InvalidArgument(text("tensor '", saved.full_name(), "' is ", shape_of(saved.tensor), " in the snapshot, and ",
                               shape_of(here), " here"),
                          kSameProgram);
}

void check_count(const Entries& entries, size_t count) {
  if (entries.size() != count)
    throw InvalidArgument(text("'", entries.front().item, "' was saved from an object of another type"), kSameProgram);
}

// --- numbers ---

template <typename T>
constexpr at::ScalarType kDtype = std::is_same_v<T, double> ? at::kDouble : at::kLong;

template <typename T>
at::Tensor tensor_of(T number) {
  at::Tensor tensor = at::empty({}, kDtype<T>);
  std::memcpy(tensor.mutable_data_ptr(), &number, sizeof number);
  return tensor;
}

template <typename T>
T number_in(const Entry& entry) {
  if (entry.tensor.scalar_type() != kDtype<T> || entry.tensor.numel() != 1)
    throw InvalidArgument(text("'", entry.full_name(), "' is ", shape_of(entry.tensor), " in the snapshot, and a ",
                               std::is_same_v<T, double> ? "double" : "int64_t", " here"),
                          kSameProgram);
  T number;
  std::memcpy(&number, entry.tensor.const_data_ptr(), sizeof number);
  return number;
}

// --- items ---

class ModuleItem final : public Item {
 public:
  explicit ModuleItem(torch::nn::Module& module) : module_(module) {}

  Entries save() override {
    Entries entries;
    for (const auto& [name, kind, tensor] : tensors()) {
      Entry entry{.name = name, .kind = kind, .order = static_cast<int64_t>(entries.size())};
      if (!parallel::is_watched(tensor)) {
        entry.tensor = storable(tensor, name);
      } else {
        entry.only = parallel::owner_of(tensor);
        entry.tensor = parallel::belongs_to_another_rank(tensor)
                           ? at::empty(tensor.sizes(), tensor.options().device(at::kMeta).requires_grad(false))
                           : storable(parallel::unwatched(tensor), name);
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

  void check(const Entries& entries) const override {
    const auto here = tensors();
    for (size_t i = 0; i < std::max(entries.size(), here.size()); ++i) {
      if (i < entries.size() && i < here.size() && entries[i].name == here[i].name) {
        check_fits(entries[i], here[i].tensor);
      } else if (i < entries.size()) {
        throw InvalidArgument(text("the snapshot has a tensor '", entries[i].full_name(), "' where the module has ",
                                   i < here.size() ? text("'", here[i].name, "'") : "none"),
                              kSameProgram);
      } else {
        throw InvalidArgument(text("the module has a tensor '", here[i].name, "' that the snapshot lacks"),
                              kSameProgram);
      }
    }
  }

  void load(const Entries& entries) override {
    const at::NoGradGuard no_grad;
    auto here = tensors();
    for (size_t i = 0; i < here.size(); ++i) {
      const at::Tensor& to = here[i].tensor;
      if (parallel::belongs_to_another_rank(to)) continue;
      if (parallel::is_watched(to)) {
        parallel::unwatched(to).copy_(entries[i].tensor);
        torch::autograd::impl::bump_version(to);
      } else {
        to.copy_(entries[i].tensor);
      }
    }
  }
  bool is_spread() const override {
    const auto all = tensors();
    return std::any_of(all.begin(), all.end(), [](const Named& each) { return parallel::is_watched(each.tensor); });
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

  torch::nn::Module& module_;
};

class ArchiveItem : public Item {
 public:
  ArchiveItem(SaveFn save, LoadFn load) : save_(std::move(save)), load_(std::move(load)) {}
  Entries save() override { return save_archive(save_); }
  void load(const Entries& entries) override { load_archive(entries, load_); }
  bool may_refuse() const override { return true; }

 private:
  SaveFn save_;
  LoadFn load_;
};

// Calls fn() on each tensor in the state of torch's own optimizers except LBFGS. Skips the state of other optimizers.
void for_each_tensor(torch::optim::Optimizer& optimizer, const std::function<void(at::Tensor&)>& fn) {
  using namespace torch::optim;
  const auto adam = [&](auto& state) {
    fn(state.exp_avg());
    fn(state.exp_avg_sq());
    fn(state.max_exp_avg_sq());
  };
  for (auto& [parameter, state] : optimizer.state()) {
    if (auto* const sgd = dynamic_cast<SGDParamState*>(state.get())) {
      fn(sgd->momentum_buffer());
    } else if (auto* const of_adam = dynamic_cast<AdamParamState*>(state.get())) {
      adam(*of_adam);
    } else if (auto* const of_adam_w = dynamic_cast<AdamWParamState*>(state.get())) {
      adam(*of_adam_w);
    } else if (auto* const rms = dynamic_cast<RMSpropParamState*>(state.get())) {
      fn(rms->square_avg());
      fn(rms->momentum_buffer());
      fn(rms->grad_avg());
    } else if (auto* const adagrad = dynamic_cast<AdagradParamState*>(state.get())) {
      fn(adagrad->sum());
    }
  }
}

// Replaces these tensors with numbers, until it is destroyed. An archive that is written meanwhile is small; torch
// would write and read the tensors' data several times. The user of the archive puts the tensors back by their numbers.
class Numbered {
 public:
  explicit Numbered(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {
    for_each_tensor(optimizer_, [&](at::Tensor& tensor) {
      if (!tensor.defined()) return;
      tensors_.push_back(tensor);
      tensor = tensor_of(static_cast<int64_t>(tensors_.size() - 1));
    });
  }
  Numbered(const Numbered&) = delete;
  Numbered& operator=(const Numbered&) = delete;
  ~Numbered() {
    size_t next = 0;  // the order is the same, because nothing has changed the state meanwhile
    for_each_tensor(optimizer_, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = tensors_[next++];
    });
  }
  const at::Tensor& tensor(int64_t number) const { return tensors_.at(static_cast<size_t>(number)); }

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<at::Tensor> tensors_;
};

// True if the optimizer's archive has all of these tensors under "state". A class that is derived from one of torch's
// optimizers may write others.
bool has_known_archive(const torch::optim::Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  return type == typeid(SGD) || type == typeid(Adam) || type == typeid(AdamW) || type == typeid(RMSprop) ||
         type == typeid(Adagrad);
}

bool is_in_state(const Entry& entry) { return entry.kind == "tensor" && entry.name.starts_with("state/"); }

// Whether an optimizer's parameters are shared, so that each rank has another part of its state. One without parameters
// may be that of a rank that owns none.
bool has_a_part(const torch::optim::Optimizer& optimizer) {
  bool is_empty = true;
  for (const auto& group : optimizer.param_groups()) {
    if (std::any_of(group.params().begin(), group.params().end(), parallel::is_shared)) return true;
    is_empty &= group.params().empty();
  }
  return is_empty;
}

// Which of its parameters this rank owns: 1 for each of them in the order of the groups, 0 for the others.
constexpr char kOwned[] = "owned parameters";
at::Tensor owned_by_this_rank(const torch::optim::Optimizer& optimizer) {
  std::vector<int64_t> owned;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      owned.push_back(parallel::belongs_to_another_rank(parameter) ? 0 : 1);
  at::Tensor tensor = at::empty({static_cast<int64_t>(owned.size())}, at::kLong);
  std::copy(owned.begin(), owned.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

class OptimizerItem final : public ArchiveItem {
 public:
  explicit OptimizerItem(torch::optim::Optimizer& optimizer)
      : ArchiveItem([&optimizer](torch::serialize::OutputArchive& archive) { optimizer.save(archive); },
                    [&optimizer](torch::serialize::InputArchive& archive) { optimizer.load(archive); }),
        optimizer_(optimizer) {}

  Entries save() override {
    // torch's archives cannot hold the undefined tensors in LBFGS's `al`, which is scratch: each place is written
    // before it is read.
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer_) != nullptr)
      for (auto& [parameter, state] : optimizer_.state())
        if (auto& al = static_cast<torch::optim::LBFGSParamState&>(*state).al())
          for (auto& tensor : *al)
            if (!tensor.defined()) tensor = at::empty({0});
    Entries entries = save_state();
    if (has_a_part(optimizer_))
      entries.push_back({.name = kOwned,
                         .kind = "tensor",
                         .order = static_cast<int64_t>(entries.size()),
                         .tensor = owned_by_this_rank(optimizer_)});
    return entries;
  }

  // Compares the numbers of groups and parameters that torch's serialize() writes. An optimizer with another archive
  // has to check its own in load().
  void check(const Entries& entries) const override {
    const auto expect = [&](const std::string& name, size_t here, const char* what) {
      for (const auto& entry : entries)
        if (entry.name == name && entry.kind == "tensor" && number_in<int64_t>(entry) != static_cast<int64_t>(here))
          throw InvalidArgument(text("'", entries.front().item, "' has ", number_in<int64_t>(entry), " ", what,
                                     " in the snapshot, and ", here, " here"),
                                kSameProgram);
    };
    const auto& groups = optimizer_.param_groups();
    expect("param_groups/param_groups:size", groups.size(), "groups of parameters");
    for (size_t i = 0; i < groups.size(); ++i)
      expect(text("param_groups/param_groups:", i, "/params:size"), groups[i].params().size(), "parameters in a group");
    // A rank must not get states of parameters that another rank owns now, and must get those of all that it owns.
    const auto owned = std::find_if(entries.begin(), entries.end(), is_owned);
    if (has_a_part(optimizer_) != (owned != entries.end()) ||
        (owned != entries.end() && !at::equal(owned->tensor, owned_by_this_rank(optimizer_))))
      throw InvalidArgument(
          text("the ranks own other parameters of '", entries.front().item, "' than when the snapshot was saved"),
          "Use the same FsdpOptions and the same ranks on each host, and freeze the same parameters");
  }

  void load(const Entries& all) override {
    Entries entries = all;
    std::erase_if(entries, is_owned);
    optimizer_.state().clear();  // load() only adds to it
    if (!has_known_archive(optimizer_)) return ArchiveItem::load(entries);
    Entries small = entries;
    for (size_t i = 0; i < small.size(); ++i)
      if (is_in_state(small[i])) small[i].tensor = tensor_of(static_cast<int64_t>(i));
    ArchiveItem::load(small);
    for_each_tensor(optimizer_, [&](at::Tensor& tensor) {
      if (tensor.defined()) tensor = entries.at(static_cast<size_t>(tensor.item<int64_t>())).tensor.clone();
    });
  }
  bool differs_between_ranks() const override { return has_a_part(optimizer_); }

 private:
  static bool is_owned(const Entry& entry) { return entry.name == kOwned; }

  Entries save_state() {
    if (!has_known_archive(optimizer_)) return ArchiveItem::save();
    const Numbered numbered(optimizer_);
    Entries entries = ArchiveItem::save();
    for (auto& entry : entries)
      if (is_in_state(entry)) entry.tensor = storable(numbered.tensor(number_in<int64_t>(entry)), entry.name);
    return entries;
  }

  torch::optim::Optimizer& optimizer_;
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
  void load(const Entries& entries) override {
    const at::NoGradGuard no_grad;
    tensor_.copy_(entries[0].tensor);
  }

 private:
  at::Tensor& tensor_;
};

template <typename T>
class NumberItem final : public Item {
 public:
  explicit NumberItem(T& number) : number_(number) {}
  Entries save() override { return {{.kind = "number", .tensor = tensor_of(number_)}}; }
  void check(const Entries& entries) const override {
    check_count(entries, 1);
    number_in<T>(entries[0]);
  }
  void load(const Entries& entries) override { number_ = number_in<T>(entries[0]); }

 private:
  T& number_;
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

std::unique_ptr<Item> make_item(torch::nn::Module& module) { return std::make_unique<ModuleItem>(module); }
std::unique_ptr<Item> make_item(torch::optim::Optimizer& optimizer) {
  return std::make_unique<OptimizerItem>(optimizer);
}
std::unique_ptr<Item> make_item(at::Generator generator) {
  return std::make_unique<GeneratorItem>(std::move(generator));
}
std::unique_ptr<Item> make_item(at::Tensor& tensor) { return std::make_unique<TensorItem>(tensor); }
std::unique_ptr<Item> make_item(int64_t& number) { return std::make_unique<NumberItem<int64_t>>(number); }
std::unique_ptr<Item> make_item(double& number) { return std::make_unique<NumberItem<double>>(number); }
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
