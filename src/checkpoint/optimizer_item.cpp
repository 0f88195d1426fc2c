#include <torch/serialize/archive.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "checkpoint/item_values.h"
#include "checkpoint/items.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/parallel/model_averager.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "optim/torch_states.h"
#include "parallel/kit/state_owner.h"

namespace muster::checkpoint {
namespace {

using optim::Field;
using optim::parameters_of;
using optim::State;
using optim::StateAside;
using torch::optim::Optimizer;

// Whether its parameters have owners, so that each rank has another part of its state. One without parameters may be
// that of a rank that owns none.
bool has_a_part(Optimizer& optimizer) {
  const auto parameters = parameters_of(optimizer);
  return parameters.empty() || std::any_of(parameters.begin(), parameters.end(), [&](const at::Tensor& each) {
           return parallel::state_owner(optimizer, each).has_value();
         });
}

// In an item that each rank stores: which of the parameters this rank owns; 1 for each of them, 0 for the others.
constexpr char kOwned[] = "owned parameters";
bool is_owned(const Entry& entry) { return entry.name == kOwned; }
at::Tensor owned_by_this_rank(Optimizer& optimizer) {
  const auto parameters = parameters_of(optimizer);
  at::Tensor owned = at::empty({static_cast<int64_t>(parameters.size())}, at::kLong);
  std::transform(parameters.begin(), parameters.end(), owned.mutable_data_ptr<int64_t>(),
                 [&](const at::Tensor& each) { return parallel::keeps_state(optimizer, each) ? 1 : 0; });
  return owned;
}

// Into the object that is there, if it can be done: the program may have a reference to it.
void put_back(torch::optim::OptimizerParamGroup& group, std::unique_ptr<torch::optim::OptimizerOptions> options) {
  try {
    std::stringstream stream;
    torch::serialize::OutputArchive written;
    options->serialize(written);
    written.save_to(stream);
    torch::serialize::InputArchive read;
    read.load_from(stream);
    group.options().serialize(read);
  } catch (const c10::Error&) {  // a type that has no serialize()
    group.set_options(std::move(options));
  }
}

// "state/3/exp_avg": the field of what an optimizer keeps for its third parameter.
constexpr std::string_view kState = "state/";
bool is_in_state(const Entry& entry) { return entry.name.starts_with(kState); }
// With the number of the parameter from 0.
std::optional<optim::FieldPlace> place_in_state(const Entry& entry, size_t parameters) {
  if (!is_in_state(entry)) return std::nullopt;
  auto place = optim::place_of(std::string_view(entry.name).substr(kState.size()));
  if (!place || place->parameter < 1 || place->parameter > parameters) return std::nullopt;
  --place->parameter;
  return place;
}

class OptimizerItem final : public Item {
 public:
  explicit OptimizerItem(Optimizer& optimizer)
      : optimizer_(optimizer),
        type_(parallel::class_of(optimizer)),
        is_known_(optim::new_state_for(type_) != nullptr) {}

  Entries save() override {
    Entries entries = is_known_ ? save_known() : save_archive(save_);
    if (has_a_part(optimizer_))
      entries.push_back({.name = kOwned,
                         .kind = "tensor",
                         .order = entries.empty() ? 0 : entries.back().order + 1,
                         .tensor = owned_by_this_rank(optimizer_),
                         .only = kIfPerRank});
    return entries;
  }

  std::vector<Need> needs(const Entries& entries) const override {
    std::vector<Need> needs(entries.size());
    if (!is_known_) return needs;
    const auto parameters = parameters_of(optimizer_);
    for (size_t i = 0; i < entries.size(); ++i) {
      if (const auto place = place_in_state(entries[i], parameters.size()))
        if (const auto owner = parallel::state_owner(optimizer_, parameters[place->parameter]))
          needs[i] = {.owner = owner->rank, .is_only_owner = owner->is_only, .here = owner->is_this_rank};
    }
    return needs;
  }

  // Compares the numbers of groups and parameters that torch's serialize() writes. An optimizer with another archive
  // has to check its own in load().
  void check(const Entries& entries) const override {
    const auto expect = [&](const std::string& name, size_t here, const char* what) {
      for (const auto& entry : entries)
        if (entry.name == name && entry.kind == "tensor" && number_in<int64_t>(entry) != static_cast<int64_t>(here))
          throw InvalidArgument(text("'", entries.front().item, "' in the snapshot: expected ", here, " ", what,
                                     ", as here, got ", number_in<int64_t>(entry)),
                                kSameProgram);
    };
    const auto& groups = optimizer_.param_groups();
    expect("param_groups/param_groups:size", groups.size(), "groups of parameters");
    for (size_t i = 0; i < groups.size(); ++i)
      expect(text("param_groups/param_groups:", i, "/params:size"), groups[i].params().size(), "parameters in a group");
    if (is_known_) check_state(entries);
    // A rank must not get states of parameters that another rank owns now, and must get those of all that it owns. If
    // the item is stored once, each rank takes what it needs.
    const bool is_per_rank = entries.front().rank != kShared;
    const auto owned = std::find_if(entries.begin(), entries.end(), is_owned);
    if ((is_per_rank && has_a_part(optimizer_)) != (owned != entries.end()) ||
        (owned != entries.end() && !at::equal(owned->tensor, owned_by_this_rank(optimizer_))))
      throw InvalidArgument(
          text("the ranks own other parameters of '", entries.front().item, "' than when the snapshot was saved"),
          "Use the same options and the same ranks on each host, and freeze the same parameters");
  }

  bool comes_in_parts(const Entry& entry) const override { return is_known_ && is_in_state(entry); }

  void load(const Entries& entries) override {
    Entries archive = entries;
    std::erase_if(archive, is_owned);
    options_before_.clear();
    for (auto& group : optimizer_.param_groups())
      options_before_.push_back(group.has_options() ? group.options().clone() : nullptr);
    if (is_known_) {
      const StateAside aside(optimizer_);
      load_archive(archive, load_);
    }
    parameters_ = parameters_of(optimizer_);
    before_ = std::exchange(optimizer_.state(), {});  // an archive only adds to it
    if (is_known_) return;
    load_archive(archive, load_);
    for (const at::Tensor& parameter : parameters_)  // what it has read is on the CPU
      for (const Field& field : optim::fields_of(optimizer_.state(), parameter))
        if (field.tensor && field.tensor->defined()) *field.tensor = field.tensor->to(parameter.device());
  }

  at::Tensor memory_for(const Entry& entry) override {
    const auto [index, field_name] = place_in_state(entry, parameters_.size()).value();  // check() has accepted it
    const at::Tensor& parameter = parameters_[index];
    if (!parameter.is_cpu() || entry.kind == "number") return {};
    const at::Tensor before = before_here(parameter, field_name);
    if (!fits(before, entry.tensor, parameter.device()))
      return at::empty(entry.tensor.sizes(), entry.tensor.scalar_type());
    return takes_bytes_of(entry.tensor, before) ? before : at::Tensor();  // if it does not, load_part() copies
  }

  void load_part(const Entries& entries) override {
    has_parts_ = true;
    for (const Entry& entry : entries) {
      const auto [index, field_name] = place_in_state(entry, parameters_.size()).value();  // check() has accepted it
      const at::Tensor& parameter = parameters_[index];
      State& state = optimizer_.state()[parameter.unsafeGetTensorImpl()];
      if (!state) state = optim::new_state_for(type_);
      for (const Field& field : optim::fields_of(*state)) {
        if (field.name != field_name) continue;
        if (field.number)
          *field.number = number_in<int64_t>(entry);
        else if (entry.in_place)
          *field.tensor = entry.tensor;
        else
          *field.tensor = with_values(before_here(parameter, field_name), entry.tensor, parameter.device());
      }
    }
  }
  // States that new values have come into cannot be put back.
  void end_load(bool is_whole) override {
    auto& groups = optimizer_.param_groups();
    if (!is_whole && !std::exchange(has_parts_, false) && options_before_.size() == groups.size()) {
      for (size_t i = 0; i < groups.size(); ++i)
        if (options_before_[i]) put_back(groups[i], std::move(options_before_[i]));
      if (!parameters_.empty()) optimizer_.state() = std::move(before_);
    }
    before_.clear();
    options_before_.clear();
    parameters_.clear();
    has_parts_ = false;
  }

  Refusal refusal() const override { return Refusal::kUnlikely; }

  std::string what_is_equal(bool saves) const override {
    std::string all;
    if (has_own_states()) all = text("of rank ", World::current().rank(), '\n');
    for (const at::Tensor& parameter : parameters_of(optimizer_)) {
      const auto owner = parallel::state_owner(optimizer_, parameter);
      const bool has_state = optimizer_.state().count(parameter.unsafeGetTensorImpl()) > 0;
      // After torch::load() into a sharded module, its parameters are not shared until forward(), and each rank has
      // other states.
      all += text('[', join(parameter.sizes()), "] ");
      if (!owner)
        all += saves && has_state ? "has state\n" : "\n";
      else if (is_known_)
        all += text(owner->name, ' ', owner->first, '\n');
      else
        all += text(owner->is_this_rank, '\n');
    }
    return all;
  }
  bool may_differ() const override { return has_a_part(optimizer_) || has_own_states(); }

  std::set<int> spread_over() const override {
    std::set<int> ranks;
    if (!is_known_) return ranks;
    for (const at::Tensor& parameter : parameters_of(optimizer_))
      if (const auto owner = parallel::state_owner(optimizer_, parameter)) ranks.insert(owner->first);
    return ranks;
  }

 private:
  bool has_own_states() const { return dynamic_cast<const AveragesModel*>(&optimizer_) != nullptr; }
  // What the optimizer kept there before restore(); undefined if it kept nothing.
  at::Tensor before_here(const at::Tensor& parameter, std::string_view name) const {
    for (const Field& field : optim::fields_of(before_, parameter))
      if (field.name == name && field.tensor) return *field.tensor;
    return {};
  }
  static bool fits(const at::Tensor& before, const at::Tensor& values, c10::Device device) {
    return before.defined() && before.layout() == at::kStrided && before.device() == device &&
           before.sizes() == values.sizes() && before.scalar_type() == values.scalar_type();
  }
  // In the memory of `before`, if it fits: that may be a file's (StateOffload).
  static at::Tensor with_values(const at::Tensor& before, const at::Tensor& values, c10::Device device) {
    const at::NoGradGuard no_grad;
    return fits(before, values, device) ? at::Tensor(before).copy_(values)
                                        : values.to(device, values.scalar_type(), false, /*copy=*/true);
  }

  // The options as an archive, and the state field by field, so that ranks can have different parts of it.
  Entries save_known() {
    StateAside aside(optimizer_);
    Entries entries = save_archive(save_);
    const size_t options = entries.size();
    const auto parameters = parameters_of(optimizer_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto owner = parallel::state_owner(optimizer_, parameters[i]);
      if (owner && !owner->is_this_rank) continue;
      const auto fields = optim::fields_of(aside.kept(), parameters[i]);
      for (size_t f = 0; f < fields.size(); ++f) {
        const auto& [field, tensor, number] = fields[f];
        if (tensor && !tensor->defined()) continue;
        const std::string name = text(kState, i + 1, "/", field);
        entries.push_back({.name = name,
                           .kind = tensor ? "tensor" : "number",
                           .order = static_cast<int64_t>(options + i * fields.size() + f),  // the same on all ranks
                           .tensor = tensor ? storable(*tensor, name) : tensor_of(*number),
                           .only = owner ? owner->first : kEveryRank});
      }
    }
    return entries;
  }

  void check_state(const Entries& entries) const {
    const auto parameters = parameters_of(optimizer_);
    const State state = optim::new_state_for(type_);
    const auto fields = optim::fields_of(*state);
    for (const Entry& entry : entries) {
      if (!is_in_state(entry)) continue;
      const auto place = place_in_state(entry, parameters.size());
      const auto field = std::find_if(fields.begin(), fields.end(),
                                      [&](const Field& each) { return place && each.name == place->field; });
      if (field == fields.end())
        throw InvalidArgument(text("this optimizer keeps nothing like '", entry.full_name(), "'"), kSameProgram);
      const at::Tensor& parameter = parameters[place->parameter];
      if (entry.tensor.sizes() != optim::shape_of(*state, *field, parameter) ||
          (field->number && entry.tensor.scalar_type() != at::kLong))
        throw InvalidArgument(text("'", entry.full_name(), "' is ", shape_of(entry.tensor),
                                   " in the snapshot, and its parameter is ", shape_of(parameter)),
                              kSameProgram);
    }
  }

  Optimizer& optimizer_;
  const std::type_info& type_;
  const bool is_known_;  // as optim::new_state_for() does
  // From load() to end_load():
  std::vector<at::Tensor> parameters_;
  optim::States before_;                                                         // the state before load()
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_before_;  // of each group; null: none
  bool has_parts_ = false;                                                       // load_part() was called
  const SaveFn save_ = [this](torch::serialize::OutputArchive& archive) {
    optim::define_scratch_of_lbfgs(optimizer_);
    if (const auto* const sharded = dynamic_cast<const ShardedOptimizer*>(&optimizer_))
      sharded->save_part(archive);
    else
      optimizer_.save(archive);
  };
  const LoadFn load_ = [this](torch::serialize::InputArchive& archive) { optimizer_.load(archive); };
};

}  // namespace

std::unique_ptr<Item> make_item(Optimizer& optimizer) { return std::make_unique<OptimizerItem>(optimizer); }

}  // namespace muster::checkpoint
