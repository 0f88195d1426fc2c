#include "muster/parallel/sync_batch_norm.h"

#include <ATen/ops/batch_norm_native.h>
#include <ATen/ops/empty.h>
#include <c10/core/UndefinedTensorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/library.h>
#include <torch/nn/modules/instancenorm.h>

#include <initializer_list>
#include <mutex>
#include <optional>
#include <ostream>
#include <shared_mutex>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/batch_norm/whole_batch_norm.h"
#include "parallel/kit/group_beside.h"
#include "parallel/modules/same_module.h"

namespace muster {
namespace {

namespace nn = torch::nn;

// The tensors of converted modules. A mark keeps the address of its tensor from being used again, not the tensor.
class Marks {
 public:
  struct Mark {
    std::weak_ptr<const Group> group;
    bool is_only_a_mark = false;  // a tensor without values, made by convert_sync_batchnorm()
  };

  static Marks& all() {
    static auto* const marks = new Marks;  // modules may outlive static objects
    return *marks;
  }

  void put(const at::Tensor& tensor, Mark mark) {
    const std::lock_guard lock(mutex_);
    by_tensor_.insert_or_assign(tensor.unsafeGetTensorImpl(), Entry{Weak(tensor.getIntrusivePtr()), std::move(mark)});
  }
  std::optional<Mark> find(const at::Tensor& tensor) const {
    if (!tensor.defined()) return std::nullopt;
    const std::shared_lock lock(mutex_);
    const auto at = by_tensor_.find(tensor.unsafeGetTensorImpl());
    return at == by_tensor_.end() ? std::nullopt : std::optional(at->second.mark);
  }
  std::optional<Mark> find_any(std::initializer_list<const at::Tensor*> tensors) const {
    std::optional<Mark> mark;
    for (const at::Tensor* const tensor : tensors)
      if (!mark) mark = find(*tensor);
    return mark;
  }
  void forget_what_is_gone() {
    const std::lock_guard lock(mutex_);
    std::erase_if(by_tensor_, [](const auto& item) { return item.second.tensor.expired(); });
  }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Entry {
    Weak tensor;
    Mark mark;
  };
  mutable std::shared_mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, Entry> by_tensor_;
};

// Stands behind aten::batch_norm.
at::Tensor batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight,
                      const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& running_mean,
                      const std::optional<at::Tensor>& running_var, bool training, double momentum, double eps,
                      bool cudnn_enabled) {
  if (training) {
    for (const auto* const tensor : {&running_mean, &weight, &bias}) {
      const auto mark = Marks::all().find(tensor->value_or(at::Tensor()));
      if (!mark) continue;
      return parallel::whole_batch_norm({.input = input,
                                         .weight = weight,
                                         .bias = bias,
                                         .running_mean = mark->is_only_a_mark ? std::nullopt : running_mean,
                                         .running_var = running_var,
                                         .momentum = momentum,
                                         .eps = eps},
                                        mark->group);
    }
  }
  return at::native::batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled);
}

// No thread may run aten::batch_norm meanwhile.
void put_kernel_in_place() {
  static const torch::Library library = [] {
    // libtorch warns of a second kernel, which is what is meant here.
    struct Quiet : c10::WarningHandler {
      void process(const c10::Warning& /*warning*/) override {}
    } quiet;
    const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
    torch::Library aten(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
    aten.impl("batch_norm", torch::dispatch(c10::DispatchKey::CompositeImplicitAutograd, TORCH_FN(batch_norm)));
    return aten;
  }();
}

// A BatchNorm of one of libtorch's classes, which have no common base.
struct Norm {
  std::string name;
  nn::BatchNormOptions options;
  at::Tensor *weight, *bias, *running_mean;
  at::Tensor running_var;
};

// Calls fn with the module as the class, if it is of one of them.
template <typename... Classes>
void if_one_of(nn::Module& module, const auto& fn) {
  const auto try_as = [&](auto* known) {
    if (known) fn(*known);
  };
  (try_as(dynamic_cast<Classes*>(&module)), ...);
}

void if_batch_norm(nn::Module& module, const auto& fn) {
  if_one_of<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(module, fn);
}

std::vector<Norm> norms_of(nn::Module& net) {
  std::vector<Norm> all;
  std::unordered_set<const nn::Module*> seen;
  net.apply([&](const std::string& name, nn::Module& module) {
    if (!seen.insert(&module).second) return;
    if_batch_norm(module, [&](auto& norm) {
      all.push_back({name.empty() ? "the net itself" : name, norm.options, &norm.weight, &norm.bias, &norm.running_mean,
                     norm.running_var});
    });
  });
  return all;
}

void require_same_on_all_ranks(const std::vector<Norm>& norms, const Group& group) {
  std::vector<parallel::NamedTensor> tensors;
  std::string options = "of BatchNorm:";
  for (const Norm& norm : norms) {
    for (const auto& [name, tensor] :
         {std::pair<const char*, at::Tensor>{".weight", *norm.weight}, {".running_var", norm.running_var}})
      if (tensor.defined()) tensors.push_back({norm.name + name, tensor});
    const auto& momentum = norm.options.momentum();
    options += text(" ", norm.name, " (", norm.options.num_features(), ", eps ", norm.options.eps(), ", momentum ",
                    momentum ? text(*momentum) : "none", ")");
  }
  parallel::require_same_on_all_ranks(tensors, options, group);
}

}  // namespace

bool parallel::has_synchronized_norm(nn::Module& net) {
  for (const Norm& norm : norms_of(net))
    if (Marks::all().find_any({norm.weight, norm.bias, norm.running_mean})) return true;
  bool has_module = false;
  net.apply([&](nn::Module& module) { has_module |= dynamic_cast<SyncBatchNormImpl*>(&module) != nullptr; });
  return has_module;
}

std::vector<at::Tensor> parallel::statistics_of_own_batches(nn::Module& net, const Group& group) {
  const auto beside = existing_group_beside(group);
  const auto is_that = [&](const std::weak_ptr<const Group>& of) { return beside && of.lock() == beside; };
  std::vector<at::Tensor> all;
  net.apply([&](nn::Module& module) {
    const auto add = [&](const auto& norm) {
      const auto mark = Marks::all().find_any({&norm.weight, &norm.bias, &norm.running_mean});
      if (mark && is_that(mark->group)) return;
      for (const at::Tensor& tensor : {norm.running_mean, norm.running_var, norm.num_batches_tracked})
        if (tensor.defined()) all.push_back(tensor);
    };
    if_batch_norm(module, add);
    if_one_of<nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl, SyncBatchNormImpl>(module, add);
  });
  return all;
}

size_t convert_sync_batchnorm(nn::Module& net, const Group& given) {
  const Group group = given.resolved();
  const std::vector<Norm> norms = norms_of(net);
  const auto existing = parallel::existing_group_beside(group);
  for (const Norm& norm : norms)
    for (const auto* const tensor : {norm.weight, norm.bias, norm.running_mean})
      if (const auto mark = Marks::all().find(*tensor))
        if (const auto other = mark->group.lock(); other && other != existing)
          throw InvalidArgument(text(norm.name, " is synchronized in another group already"),
                                "Convert a module once, or a clone() of it");
  require_same_on_all_ranks(norms, group);
  if (norms.empty()) return 0;
  // All ranks of the group are here now, and leave after the barrier: none runs an operator meanwhile.
  put_kernel_in_place();
  const auto beside = parallel::group_beside(group);
  barrier({.group = *beside});
  Marks::all().forget_what_is_gone();
  for (const Norm& norm : norms) {
    const auto before = Marks::all().find(*norm.running_mean);
    const bool is_only_a_mark = !norm.running_mean->defined() || (before && before->is_only_a_mark);
    if (!norm.running_mean->defined()) *norm.running_mean = at::empty({0}, at::TensorOptions(at::kCPU));
    Marks::all().put(*norm.running_mean, {.group = beside, .is_only_a_mark = is_only_a_mark});
    for (const auto* const tensor : {norm.weight, norm.bias})
      if (tensor->defined()) Marks::all().put(*tensor, {.group = beside});
  }
  return norms.size();
}

// --- the module ---

SyncBatchNormImpl::SyncBatchNormImpl(const nn::BatchNormOptions& options, const Group& group)
    : NormImplBase(options), group_(parallel::group_beside(group)) {
  if (running_mean.defined()) Marks::all().put(running_mean, {.group = group_});  // for statistics_of_own_batches()
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  if (input.dim() < 2)
    throw InvalidArgument(
        text("the input of SyncBatchNorm: expected two dimensions or more, got size [", join(input.sizes()), "]"),
        "Its input has two dimensions or more: batch, channels, and any others");
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  double momentum = options.momentum().value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();
  }
  const parallel::BatchNormCall call{.input = input,
                                     .weight = weight,
                                     .bias = bias,
                                     .running_mean = running_mean,
                                     .running_var = running_var,
                                     .momentum = momentum,
                                     .eps = options.eps()};
  if (is_training() || !running_mean.defined()) return parallel::whole_batch_norm(call, group_);
  return parallel::local_batch_norm(call, /*training=*/false);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "muster::SyncBatchNorm(" << options.num_features() << ", eps=" << options.eps()
         << ", momentum=" << (options.momentum() ? text(*options.momentum()) : "None")
         << ", affine=" << options.affine() << ", track_running_stats=" << options.track_running_stats() << ')';
}

std::vector<at::Tensor*> SyncBatchNormImpl::tensor_members() {
  return {&weight, &bias, &running_mean, &running_var, &num_batches_tracked};
}

}  // namespace muster
