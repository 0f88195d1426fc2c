// Where libtorch's modules keep their tensors.
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/parameterdict.h>
#include <torch/nn/modules/container/parameterlist.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/pooling.h>
#include <torch/nn/modules/rnn.h>

#include <algorithm>
#include <set>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/optim/meta.h"

namespace muster::optim {
namespace {
struct BuffersOf;
}  // namespace
}  // namespace muster::optim

namespace torch::nn {
// libtorch lets Cloneable, and nothing else, at a module's dictionary of buffers.
template <>
class Cloneable<muster::optim::BuffersOf> {
 public:
  static OrderedDict<std::string, at::Tensor>& get(Module& module) { return module.buffers_; }
};
}  // namespace torch::nn

namespace muster::optim {
namespace {

using at::Tensor;
namespace nn = torch::nn;
using Dict = torch::OrderedDict<std::string, Tensor>;
using Places = std::vector<Tensor*>;

struct Parameters : nn::Module {
  static Dict& of(nn::Module& module) { return module.*&Parameters::parameters_; }
};

// Adds a module's members that may hold registered tensors, if it is an M.
using Collect = bool (*)(nn::Module& module, Places& to);
template <typename M, auto... kMembers>
bool collect(nn::Module& module, Places& to) {
  auto* const known = dynamic_cast<M*>(&module);
  if (known) (to.push_back(&(known->*kMembers)), ...);
  return known;
}

template <typename M>
bool collect_conv(nn::Module& module, Places& to) {
  return collect<M, &M::weight, &M::bias>(module, to);
}
template <typename M>
bool collect_norm(nn::Module& module, Places& to) {
  return collect<M, &M::weight, &M::bias, &M::running_mean, &M::running_var, &M::num_batches_tracked>(module, to);
}
template <typename M>
bool collect_cell(nn::Module& module, Places& to) {
  return collect<M, &M::weight_ih, &M::weight_hh, &M::bias_ih, &M::bias_hh>(module, to);
}
template <typename M>
bool collect_rnn(nn::Module& module, Places& to) {
  struct Open : M {
    static std::vector<Tensor>& flat(M& rnn) { return rnn.*&Open::flat_weights_; }
  };
  auto* const known = dynamic_cast<M*>(&module);
  if (known)
    for (Tensor& one : Open::flat(*known)) to.push_back(&one);
  return known;
}

// Losses that keep their weight among their options.
template <typename M>
bool collect_loss(nn::Module& module, Places& to) {
  auto* const known = dynamic_cast<M*>(&module);
  if (known) to.push_back(&known->options.weight());
  return known;
}

constexpr Collect kKnown[] = {
    collect<nn::LinearImpl, &nn::LinearImpl::weight, &nn::LinearImpl::bias>,
    collect<nn::BilinearImpl, &nn::BilinearImpl::weight, &nn::BilinearImpl::bias>,
    collect_conv<nn::Conv1dImpl>,
    collect_conv<nn::Conv2dImpl>,
    collect_conv<nn::Conv3dImpl>,
    collect_conv<nn::ConvTranspose1dImpl>,
    collect_conv<nn::ConvTranspose2dImpl>,
    collect_conv<nn::ConvTranspose3dImpl>,
    collect_norm<nn::BatchNorm1dImpl>,
    collect_norm<nn::BatchNorm2dImpl>,
    collect_norm<nn::BatchNorm3dImpl>,
    collect_norm<nn::InstanceNorm1dImpl>,
    collect_norm<nn::InstanceNorm2dImpl>,
    collect_norm<nn::InstanceNorm3dImpl>,
    collect<nn::LayerNormImpl, &nn::LayerNormImpl::weight, &nn::LayerNormImpl::bias>,
    collect<nn::GroupNormImpl, &nn::GroupNormImpl::weight, &nn::GroupNormImpl::bias>,
    collect<nn::EmbeddingImpl, &nn::EmbeddingImpl::weight>,
    collect<nn::EmbeddingBagImpl, &nn::EmbeddingBagImpl::weight>,
    collect_rnn<nn::detail::RNNImplBase<nn::RNNImpl>>,
    collect_rnn<nn::detail::RNNImplBase<nn::LSTMImpl>>,
    collect_rnn<nn::detail::RNNImplBase<nn::GRUImpl>>,
    collect_cell<nn::RNNCellImpl>,
    collect_cell<nn::LSTMCellImpl>,
    collect_cell<nn::GRUCellImpl>,
    collect<nn::MultiheadAttentionImpl, &nn::MultiheadAttentionImpl::in_proj_weight,
            &nn::MultiheadAttentionImpl::in_proj_bias, &nn::MultiheadAttentionImpl::bias_k,
            &nn::MultiheadAttentionImpl::bias_v, &nn::MultiheadAttentionImpl::q_proj_weight,
            &nn::MultiheadAttentionImpl::k_proj_weight, &nn::MultiheadAttentionImpl::v_proj_weight>,
    collect<nn::PReLUImpl, &nn::PReLUImpl::weight>,
    collect<nn::FractionalMaxPool2dImpl, &nn::FractionalMaxPool2dImpl::_random_samples>,
    collect<nn::FractionalMaxPool3dImpl, &nn::FractionalMaxPool3dImpl::_random_samples>,
    collect_loss<nn::BCELossImpl>,
    collect_loss<nn::MultiLabelSoftMarginLossImpl>,
    collect_loss<nn::MultiMarginLossImpl>,
    collect<nn::NLLLossImpl, &nn::NLLLossImpl::weight>,
    collect<nn::CrossEntropyLossImpl, &nn::CrossEntropyLossImpl::weight>,
    collect<nn::BCEWithLogitsLossImpl, &nn::BCEWithLogitsLossImpl::weight, &nn::BCEWithLogitsLossImpl::pos_weight>,
    collect<nn::ParameterDictImpl>,  // only in the dictionary
    collect<nn::ParameterListImpl>,
};

// Returns whether it knows all members of the module that hold tensors.
bool members_of(nn::Module& module, Places& to) {
  static thread_local std::unordered_map<std::type_index, Collect> known;  // saves the search among the classes
  if (auto* const own = dynamic_cast<TensorMembers*>(&module)) {
    for (Tensor* const one : own->tensor_members()) to.push_back(one);
    for (const Collect each : kKnown)  // a class may derive from one of libtorch's
      if (each(module, to)) break;
    return true;
  }
  const auto [at, first] = known.try_emplace(typeid(module), nullptr);
  if (!first) return at->second && at->second(module, to);
  for (const Collect each : kKnown)
    if (each(module, to)) {
      at->second = each;
      return true;
    }
  return false;
}

}  // namespace

detail::ModuleSlots::ModuleSlots(nn::Module& root) {
  std::set<const nn::Module*> seen;
  std::unordered_map<const at::TensorImpl*, size_t> slot_of;
  const auto visit = [&](const auto& self, nn::Module& module, const std::string& prefix) -> void {
    if (!seen.insert(&module).second) return;
    Places members;
    const bool known = members_of(module, members);
    const auto add = [&](Dict& dict, bool buffers) {
      for (auto& item : dict) {
        Tensor& registered = item.value();
        if (!registered.defined()) continue;
        const std::string name = prefix + item.key();
        const auto [at, fresh] = slot_of.try_emplace(registered.unsafeGetTensorImpl(), slots_.size());
        if (fresh) slots_.push_back({name, buffers, {}});
        Slot& slot = slots_[at->second];
        names_.emplace_back(name, at->second);
        slot.places.push_back(&registered);
        const size_t before = slot.places.size();
        for (Tensor* const member : members)
          if (member->is_same(registered)) slot.places.push_back(member);
        if (slot.places.size() == before && !known)
          throw InvalidArgument(text("the ", buffers ? "buffer '" : "parameter '", name,
                                     "' cannot be replaced: Muster does not know which "
                                     "member of ",
                                     module.name(), " holds it"),
                                "Derive this class from muster::optim::TensorMembers too, and return its members, or "
                                "none if there are none.");
      }
    };
    add(Parameters::of(module), false);
    add(nn::Cloneable<BuffersOf>::get(module), true);
    for (const auto& child : module.named_children()) self(self, *child.value(), prefix + child.key() + ".");
  };
  visit(visit, root, "");
}

const detail::ModuleSlots::Slot* detail::ModuleSlots::find(const std::string& name) const {
  for (const auto& [each, index] : names_)
    if (each == name) return &slots_[index];
  return nullptr;
}

}  // namespace muster::optim
