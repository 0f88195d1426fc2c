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

// What is known of a module's members that hold tensors. kAll: of a class of libtorch; a tensor that it has registered
// but none of them holds is not used. kSome: a class that derives from one of libtorch's, and may have more.
enum class Known { kNothing, kSome, kAll };

// Adds a module's members that may hold registered tensors, if it is an M.
using Collect = Known (*)(nn::Module& module, Places& to);
template <typename M, typename Fn>
Known collect_if(nn::Module& module, Fn fn) {
  auto* const known = dynamic_cast<M*>(&module);
  if (!known) return Known::kNothing;
  fn(*known);
  return typeid(module) == typeid(M) ? Known::kAll : Known::kSome;
}
template <typename M, auto... kMembers>
Known collect(nn::Module& module, Places& to) {
  return collect_if<M>(module, [&](M& known) { (to.push_back(&(known.*kMembers)), ...); });
}
template <typename M>
Known collect_conv(nn::Module& module, Places& to) {
  return collect<M, &M::weight, &M::bias>(module, to);
}
template <typename M>
Known collect_norm(nn::Module& module, Places& to) {
  return collect<M, &M::weight, &M::bias, &M::running_mean, &M::running_var, &M::num_batches_tracked>(module, to);
}
template <typename M>
Known collect_cell(nn::Module& module, Places& to) {
  return collect<M, &M::weight_ih, &M::weight_hh, &M::bias_ih, &M::bias_hh>(module, to);
}
template <typename M>
Known collect_rnn(nn::Module& module, Places& to) {
  struct Open : nn::detail::RNNImplBase<M> {
    static std::vector<Tensor>& flat(nn::detail::RNNImplBase<M>& rnn) { return rnn.*&Open::flat_weights_; }
  };
  return collect_if<M>(module, [&](M& known) {
    for (Tensor& one : Open::flat(known)) to.push_back(&one);
  });
}
// Losses that read the weight in their options.
template <typename M>
Known collect_loss(nn::Module& module, Places& to) {
  return collect_if<M>(module, [&](M& known) { to.push_back(&known.options.weight()); });
}
Known collect_loss_with_logits(nn::Module& module, Places& to) {
  return collect_if<nn::BCEWithLogitsLossImpl>(module, [&](nn::BCEWithLogitsLossImpl& known) {
    to.insert(to.end(), {&known.weight, &known.pos_weight, &known.options.weight(), &known.options.pos_weight()});
  });
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
    collect_rnn<nn::RNNImpl>,
    collect_rnn<nn::LSTMImpl>,
    collect_rnn<nn::GRUImpl>,
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
    collect_loss_with_logits,
};

Known members_of(nn::Module& module, Places& to) {
  const auto search = [&] {
    for (const Collect each : kKnown)
      if (const Known known = each(module, to); known != Known::kNothing) return std::pair(each, known);
    // Parameters that only the dictionary has.
    const bool container =
        typeid(module) == typeid(nn::ParameterDictImpl) || typeid(module) == typeid(nn::ParameterListImpl);
    return std::pair(Collect{}, container ? Known::kAll : Known::kNothing);
  };
  if (auto* const own = dynamic_cast<TensorMembers*>(&module)) {
    for (Tensor* const one : own->tensor_members()) to.push_back(one);
    search();  // a class may derive from one of libtorch's
    return Known::kAll;
  }
  static thread_local std::unordered_map<std::type_index, std::pair<Collect, Known>> found;  // saves the search
  const auto at = found.find(typeid(module));
  if (at == found.end()) return found.try_emplace(typeid(module), search()).first->second.second;
  if (at->second.first) at->second.first(module, to);
  return at->second.second;
}

}  // namespace

detail::ModuleSlots::ModuleSlots(nn::Module& root) {
  // A tensor may be registered in several modules, and a member of one may hold what another has registered. So first
  // all members are collected, and then all registered tensors. A module may be registered twice, under two names.
  struct Found {
    nn::Module* module;
    std::string prefix;
    Known known;
  };
  std::vector<Found> modules;
  Places members;
  const auto visit = [&](const auto& self, nn::Module& module, const std::string& prefix) -> void {
    modules.push_back({&module, prefix, members_of(module, members)});
    for (const auto& child : module.named_children()) self(self, *child.value(), prefix + child.key() + ".");
  };
  visit(visit, root, "");
  std::unordered_map<const at::TensorImpl*, Places> held_by;
  for (Tensor* const member : members)
    if (member->defined()) held_by[member->unsafeGetTensorImpl()].push_back(member);

  std::unordered_map<const at::TensorImpl*, size_t> slot_of;
  for (const auto& [module, prefix, known] : modules) {
    const auto add = [&, module = module, prefix = prefix, known = known](Dict& dict, bool buffers) {
      for (auto& item : dict) {
        Tensor& registered = item.value();
        if (!registered.defined()) continue;
        const auto* const tensor = registered.unsafeGetTensorImpl();
        const std::string name = prefix + item.key();
        const auto holders = held_by.find(tensor);
        if (holders == held_by.end() && known != Known::kAll)
          throw InvalidArgument(
              text("the ", buffers ? "buffer '" : "parameter '", name,
                   "' cannot be replaced: Muster does not know which member of ", module->name(), " holds it"),
              "Derive this class from muster::optim::TensorMembers too, and return its members, or none "
              "if there are none.");
        const auto [at, fresh] = slot_of.try_emplace(tensor, slots_.size());
        if (fresh) slots_.push_back({name, buffers, {}});
        Places& places = slots_[at->second].places;
        places.push_back(&registered);
        if (fresh && holders != held_by.end())
          places.insert(places.end(), holders->second.begin(), holders->second.end());
        names_.try_emplace(name, at->second);
      }
    };
    add(Parameters::of(*module), false);
    add(nn::Cloneable<BuffersOf>::get(*module), true);
  }
}

const detail::ModuleSlots::Slot* detail::ModuleSlots::find(const std::string& name) const {
  const auto at = names_.find(name);
  return at == names_.end() ? nullptr : &slots_[at->second];
}

}  // namespace muster::optim
