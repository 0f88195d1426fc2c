#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "base/text.h"
#include "checkpoint/item_values.h"
#include "checkpoint/items.h"
#include "muster/base/error.h"
#include "parallel/shared_tensor.h"

namespace muster::checkpoint {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;
using State = std::unique_ptr<OptimizerParamState>;

// A field of what an optimizer keeps for a parameter: a tensor, which may be undefined, or a number.
struct Field {
  std::string_view name;
  at::Tensor* tensor = nullptr;
  int64_t* number = nullptr;
};

// A new state of torch's own optimizers; null for LBFGS and all others. A class that is derived from one of torch's may
// keep something else.
State new_state_for(const Optimizer& optimizer) {
  using namespace torch::optim;
  const auto& type = typeid(optimizer);
  if (type == typeid(SGD)) return std::make_unique<SGDParamState>();
  if (type == typeid(Adam)) return std::make_unique<AdamParamState>();
  if (type == typeid(AdamW)) return std::make_unique<AdamWParamState>();
  if (type == typeid(RMSprop)) return std::make_unique<RMSpropParamState>();
  if (type == typeid(Adagrad)) return std::make_unique<AdagradParamState>();
  return nullptr;
}

// The fields of such a state.
std::vector<Field> fields_of(OptimizerParamState& state) {
  using namespace torch::optim;
  const auto adam = [](auto& of) -> std::vector<Field> {
    return {{"step", nullptr, &of.step()},
            {"exp_avg", &of.exp_avg()},
            {"exp_avg_sq", &of.exp_avg_sq()},
            {"max_exp_avg_sq", &of.max_exp_avg_sq()}};
  };
  if (auto* const of = dynamic_cast<SGDParamState*>(&state)) return {{"momentum_buffer", &of->momentum_buffer()}};
  if (auto* const of = dynamic_cast<AdamParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<AdamWParamState*>(&state)) return adam(*of);
  if (auto* const of = dynamic_cast<RMSpropParamState*>(&state))
    return {{"step", nullptr, &of->step()},
            {"square_avg", &of->square_avg()},
            {"momentum_buffer", &of->momentum_buffer()},
            {"grad_avg", &of->grad_avg()}};
  if (auto* const of = dynamic_cast<AdagradParamState*>(&state))
    return {{"step", nullptr, &of->step()}, {"sum", &of->sum()}};
  return {};
}

// Without the optimizer's state while it lives: an archive that is written or read meanwhile has the options only.
class StateAside {
 public:
  explicit StateAside(Optimizer& optimizer) : optimizer_(optimizer) { std::swap(kept_, optimizer_.state()); }
  StateAside(const StateAside&) = delete;
  StateAside& operator=(const StateAside&) = delete;
  ~StateAside() { std::swap(kept_, optimizer_.state()); }
  auto& kept() { return kept_; }

 private:
  Optimizer& optimizer_;
  std::decay_t<decltype(std::declval<Optimizer&>().state())> kept_;
};

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

// Whether its parameters are shared, so that each rank has another part of its state. One without parameters may be that
// of a rank that owns none.
bool has_a_part(const Optimizer& optimizer) {
  const auto parameters = parameters_of(optimizer);
  return parameters.empty() || std::any_of(parameters.begin(), parameters.end(), parallel::is_shared);
}

// In an item that each rank stores: which of the parameters this rank owns; 1 for each of them, 0 for the others.
constexpr char kOwned[] = "owned parameters";
bool is_owned(const Entry& entry) { return entry.name == kOwned; }
at::Tensor owned_by_this_rank(const Optimizer& optimizer) {
  const auto parameters = parameters_of(optimizer);
  at::Tensor owned = at::empty({static_cast<int64_t>(parameters.size())}, at::kLong);
  std::transform(parameters.begin(), parameters.end(), owned.mutable_data_ptr<int64_t>(),
                 [](const at::Tensor& each) { return parallel::belongs_to_another_rank(each) ? 0 : 1; });
  return owned;
}

// "state/3/exp_avg": the field of what an optimizer keeps for its third parameter.
constexpr std::string_view kState = "state/";
bool is_in_state(const Entry& entry) { return entry.name.starts_with(kState); }
struct StatePlace {
  size_t parameter = 0;  // from 0
  std::string_view field;
};
std::optional<StatePlace> place_in_state(const Entry& entry, size_t parameters) {
  if (!is_in_state(entry)) return std::nullopt;
  const std::string_view rest = std::string_view(entry.name).substr(kState.size());
  size_t number = 0;
  const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || number < 1 || number > parameters || end == rest.data() + rest.size() || *end != '/')
    return std::nullopt;
  return StatePlace{number - 1, std::string_view(end + 1, rest.data() + rest.size())};
}

class OptimizerItem final : public Item {
 public:
  explicit OptimizerItem(Optimizer& optimizer)
      : optimizer_(optimizer), is_known_(new_state_for(optimizer) != nullptr) {}

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
        needs[i] = need_of(parameters[place->parameter]);
    }
    return needs;
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
    if (is_known_) check_state(entries);
    // A rank must not get states of parameters that another rank owns now, and must get those of all that it owns. If the
    // item is stored once, each rank takes what it needs.
    const bool is_per_rank = entries.front().rank != kShared;
    const auto owned = std::find_if(entries.begin(), entries.end(), is_owned);
    if ((is_per_rank && has_a_part(optimizer_)) != (owned != entries.end()) ||
        (owned != entries.end() && !at::equal(owned->tensor, owned_by_this_rank(optimizer_))))
      throw InvalidArgument(
          text("the ranks own other parameters of '", entries.front().item, "' than when the snapshot was saved"),
          "Use the same FsdpOptions and the same ranks on each host, and freeze the same parameters");
  }

  bool comes_in_parts(const Entry& entry) const override { return is_known_ && is_in_state(entry); }

  void load(const Entries& entries) override {
    Entries archive = entries;
    std::erase_if(archive, is_owned);
    if (is_known_) {
      const StateAside aside(optimizer_);
      load_archive(archive, load_);
    }
    parameters_ = parameters_of(optimizer_);
    optimizer_.state().clear();  // an archive only adds to it
    if (!is_known_) load_archive(archive, load_);
  }

  void load_part(const Entries& entries) override {
    for (const Entry& entry : entries) {
      const auto [index, field_name] = place_in_state(entry, parameters_.size()).value();  // check() has accepted it
      const at::Tensor& parameter = parameters_[index];
      State& state = optimizer_.state()[parameter.unsafeGetTensorImpl()];
      if (!state) state = new_state_for(optimizer_);
      for (const Field& field : fields_of(*state)) {
        if (field.name != field_name) continue;
        if (field.number)
          *field.number = number_in<int64_t>(entry);
        else
          *field.tensor = entry.tensor.to(parameter.device(), entry.tensor.scalar_type(), false, /*copy=*/true);
      }
    }
  }

  bool may_refuse() const override { return true; }

  std::string what_is_equal(bool saves) const override {
    std::string all;
    for (const at::Tensor& parameter : parameters_of(optimizer_)) {
      const auto* const sharing = parallel::sharing_of(parameter);
      const bool has_state = optimizer_.state().count(parameter.unsafeGetTensorImpl()) > 0;
      // After torch::load() into a sharded module, its parameters are not shared until forward(), and each rank has other
      // states.
      all += text('[', join(parameter.sizes()), "] ");
      if (!sharing)
        all += saves && has_state ? "has state\n" : "\n";
      else if (is_known_)
        all += text(sharing->name, ' ', sharing->first_owner, '\n');
      else
        all += text(sharing->is_own, '\n');
    }
    return all;
  }
  bool may_differ() const override { return has_a_part(optimizer_); }

  std::set<int> spread_over() const override {
    std::set<int> ranks;
    if (!is_known_) return ranks;
    for (const at::Tensor& parameter : parameters_of(optimizer_))
      if (const auto* const sharing = parallel::sharing_of(parameter)) ranks.insert(sharing->first_owner);
    return ranks;
  }

 private:
  // The options as an archive, and the state field by field, so that ranks can have different parts of it.
  Entries save_known() {
    StateAside aside(optimizer_);
    Entries entries = save_archive(save_);
    const size_t options = entries.size();
    const auto parameters = parameters_of(optimizer_);
    for (size_t i = 0; i < parameters.size(); ++i) {
      const auto found = aside.kept().find(parameters[i].unsafeGetTensorImpl());
      const auto* const sharing = parallel::sharing_of(parameters[i]);
      if (found == aside.kept().end() || (sharing && !sharing->is_own)) continue;
      const auto fields = fields_of(*found->second);
      for (size_t f = 0; f < fields.size(); ++f) {
        const auto& [field, tensor, number] = fields[f];
        if (tensor && !tensor->defined()) continue;
        const std::string name = text(kState, i + 1, "/", field);
        entries.push_back({.name = name,
                           .kind = tensor ? "tensor" : "number",
                           .order = static_cast<int64_t>(options + i * fields.size() + f),  // the same on all ranks
                           .tensor = tensor ? storable(*tensor, name) : tensor_of(*number),
                           .only = sharing ? sharing->first_owner : kEveryRank});
      }
    }
    return entries;
  }

  void check_state(const Entries& entries) const {
    const auto parameters = parameters_of(optimizer_);
    const State state = new_state_for(optimizer_);
    const auto fields = fields_of(*state);
    for (const Entry& entry : entries) {
      if (!is_in_state(entry)) continue;
      const auto place = place_in_state(entry, parameters.size());
      const auto field = std::find_if(fields.begin(), fields.end(),
                                      [&](const Field& each) { return place && each.name == place->field; });
      if (field == fields.end())
        throw InvalidArgument(text("this optimizer keeps nothing like '", entry.full_name(), "'"), kSameProgram);
      const at::Tensor& parameter = parameters[place->parameter];
      if (entry.tensor.sizes() != (field->number ? at::IntArrayRef() : parameter.sizes()) ||
          (field->number && entry.tensor.scalar_type() != at::kLong))
        throw InvalidArgument(text("'", entry.full_name(), "' is ", shape_of(entry.tensor),
                                   " in the snapshot, and its parameter is ", shape_of(parameter)),
                              kSameProgram);
    }
  }

  static void define_scratch_of_lbfgs(Optimizer& optimizer) {
    // torch's archives cannot hold the undefined tensors in LBFGS's `al`: each place is written before it is read.
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) == nullptr) return;
    for (auto& [parameter, state] : optimizer.state())
      if (auto& al = static_cast<torch::optim::LBFGSParamState&>(*state).al())
        for (auto& tensor : *al)
          if (!tensor.defined()) tensor = at::empty({0});
  }

  Optimizer& optimizer_;
  const bool is_known_;                 // as new_state_for() does
  std::vector<at::Tensor> parameters_;  // since load()
  const SaveFn save_ = [this](torch::serialize::OutputArchive& archive) {
    define_scratch_of_lbfgs(optimizer_);
    optimizer_.save(archive);
  };
  const LoadFn load_ = [this](torch::serialize::InputArchive& archive) { optimizer_.load(archive); };
};

}  // namespace

std::unique_ptr<Item> make_item(Optimizer& optimizer) { return std::make_unique<OptimizerItem>(optimizer); }

}  // namespace muster::checkpoint
