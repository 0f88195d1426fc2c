#include "muster/parallel/averaged_model.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_lerp.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/parallel/sync_batch_norm.h"
#include "parallel/kit/shared_tensor.h"

namespace muster {
namespace {

// fully_shard() may have come after the AveragedModel.
void require_not_shared(const std::string& name, const at::Tensor& tensor) {
  if (parallel::is_shared(tensor))
    throw InvalidArgument(text("FullyShardedDataParallel has shared ", name, " among the ranks"),
                          "Average the parameters of a DistributedDataParallel");
}

}  // namespace

struct AveragedModel::Impl {
  struct Entry {
    std::string name;
    at::Tensor tensor;   // the module's
    at::Tensor average;  // or, for a buffer that is not averaged, the last value
    bool is_averaged = true;
  };

  torch::nn::Module& module;
  const AveragedModelOptions options;
  std::vector<Entry> entries;
  int64_t updates = 0;
  bool in_use = false;

  // Calls fn(tensors of the module, averages) for those that are averaged, and for the others.
  template <typename Fn>
  void for_each_kind(const Fn& fn) const {
    for (const bool is_averaged : {true, false}) {
      std::vector<at::Tensor> tensors, averages;
      for (const Entry& entry : entries) {
        if (entry.is_averaged != is_averaged) continue;
        tensors.push_back(entry.tensor.detach());
        averages.push_back(entry.average);
      }
      if (!tensors.empty()) fn(is_averaged, tensors, averages);
    }
  }
  void require_same_module() const {
    const auto parameters = module.named_parameters();
    for (const Entry& entry : entries)
      if (const auto* const now = parameters.find(entry.name); now && !now->is_same(entry.tensor))
        throw InvalidArgument(text("parameter ", entry.name, " is another tensor than when the AveragedModel was made"),
                              "Make the AveragedModel anew");
    for (const Entry& entry : entries) require_not_shared(entry.name, entry.tensor);
  }
  void require_unused(const char* what) const {
    if (in_use) throw InvalidArgument(text("AveragedModel::", what, " while its averages are in use"));
  }
  void require_averages() const {
    if (updates == 0) throw InvalidArgument("there are no averages before the first AveragedModel::update()");
  }
  void copy_to_module() const {
    const at::NoGradGuard no_grad;
    for_each_kind([](bool, std::vector<at::Tensor>& tensors, const std::vector<at::Tensor>& averages) {
      at::_foreach_copy_(tensors, averages);
    });
  }
};

AveragedModel::AveragedModel(torch::nn::Module& module, AveragedModelOptions options)
    : impl_(new Impl{.module = module, .options = options}) {
  if (options.decay && !(*options.decay >= 0 && *options.decay <= 1))
    throw InvalidArgument(text("AveragedModelOptions::decay: expected a number from 0 to 1, got ", *options.decay),
                          "Use a number from 0 to 1, such as 0.999");
  const at::NoGradGuard no_grad;
  const auto add = [&](const auto& items, bool is_averaged) {
    for (const auto& item : items) {
      const at::Tensor& tensor = item.value();
      const bool is_known = std::any_of(impl_->entries.begin(), impl_->entries.end(),
                                        [&](const Impl::Entry& entry) { return entry.tensor.is_same(tensor); });
      if (is_known) continue;
      require_not_shared(item.key(), tensor);
      const bool is_float = tensor.is_floating_point() || tensor.is_complex();
      const bool is_short = tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
      const auto dtype = options.in_float && is_short ? at::kFloat : tensor.scalar_type();
      impl_->entries.push_back({.name = item.key(),
                                .tensor = tensor,
                                .average = tensor.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true),
                                .is_averaged = is_averaged && is_float});
    }
  };
  add(module.named_parameters(), true);
  add(module.named_buffers(), options.average_buffers);
}

AveragedModel::~AveragedModel() = default;

void AveragedModel::update() {
  Impl& s = *impl_;
  s.require_unused("update()");
  s.require_same_module();
  const at::NoGradGuard no_grad;
  const double share = s.updates == 0    ? 1
                       : s.options.decay ? 1 - *s.options.decay
                                         : 1 / static_cast<double>(s.updates + 1);
  s.for_each_kind([&](bool is_averaged, std::vector<at::Tensor>& tensors, std::vector<at::Tensor>& averages) {
    if (!is_averaged || share == 1) {
      at::_foreach_copy_(averages, tensors);
      return;
    }
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i] = tensors[i].to(averages[i].scalar_type());
    at::_foreach_lerp_(averages, tensors, share);
  });
  ++s.updates;
}

int64_t AveragedModel::updates() const { return impl_->updates; }

AveragedModel::InUse::InUse(AveragedModel& of) : of_(of) {
  Impl& s = *of.impl_;
  s.require_unused("in_use()");
  s.require_averages();
  s.require_same_module();
  for (const auto& entry : s.entries) own_.push_back(entry.tensor.detach().clone());
  s.copy_to_module();
  s.in_use = true;
}
AveragedModel::InUse::~InUse() {
  const at::NoGradGuard no_grad;
  auto& entries = of_.impl_->entries;
  for (size_t i = 0; i < entries.size(); ++i) entries[i].tensor.detach().copy_(own_[i]);
  of_.impl_->in_use = false;
}

at::Tensor AveragedModel::average(const std::string& name) const {
  for (const auto& entry : impl_->entries)
    if (entry.name == name) return entry.average;
  throw InvalidArgument(text("the module has no parameter or buffer ", name));
}

void AveragedModel::copy_to_module() {
  impl_->require_unused("copy_to_module()");
  impl_->require_averages();
  impl_->require_same_module();
  impl_->copy_to_module();
}

void AveragedModel::save(torch::serialize::OutputArchive& archive) const {
  impl_->require_unused("save()");
  archive.write("updates", c10::IValue(impl_->updates));
  for (size_t i = 0; i < impl_->entries.size(); ++i)
    archive.write(text("average", i), impl_->entries[i].average, /*is_buffer=*/true);
}

void AveragedModel::load(torch::serialize::InputArchive& archive) {
  impl_->require_unused("load()");
  c10::IValue updates;
  if (!archive.try_read("updates", updates) || !updates.isInt())
    throw CorruptError("the archive does not hold an AveragedModel", "Load what AveragedModel::save() wrote");
  std::vector<at::Tensor> loaded;
  for (size_t i = 0; i < impl_->entries.size(); ++i) {
    const auto& entry = impl_->entries[i];
    at::Tensor tensor;
    if (!archive.try_read(text("average", i), tensor, /*is_buffer=*/true) || tensor.sizes() != entry.average.sizes())
      throw InvalidArgument(text("the saved AveragedModel has no ", entry.name, " of shape ", entry.average.sizes()),
                            "Make the same module as when it was saved");
    loaded.push_back(tensor);
  }
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < loaded.size(); ++i) impl_->entries[i].average.copy_(loaded[i]);
  impl_->updates = updates.toInt();
}

namespace {

// A batch norm of any number of dimensions.
struct AveragedNorm {
  at::Tensor mean, variance, batches;
  c10::optional<double>* momentum;
};

template <size_t D, typename Derived>
void add_norm(torch::nn::NormImplBase<D, Derived, torch::nn::BatchNormOptions>& norm,
              std::vector<AveragedNorm>& norms) {
  if (norm.options.track_running_stats())
    norms.push_back({norm.running_mean, norm.running_var, norm.num_batches_tracked, &norm.options.momentum()});
}

std::vector<AveragedNorm> averaged_norms_of(torch::nn::Module& module) {
  std::vector<AveragedNorm> norms;
  for (const auto& each : module.modules()) {
    if (auto* const one = each->as<torch::nn::BatchNorm1dImpl>()) add_norm<1, torch::nn::BatchNorm1dImpl>(*one, norms);
    if (auto* const two = each->as<torch::nn::BatchNorm2dImpl>()) add_norm<2, torch::nn::BatchNorm2dImpl>(*two, norms);
    if (auto* const three = each->as<torch::nn::BatchNorm3dImpl>())
      add_norm<3, torch::nn::BatchNorm3dImpl>(*three, norms);
    if (auto* const sync = each->as<SyncBatchNormImpl>()) add_norm<0, SyncBatchNormImpl>(*sync, norms);
  }
  return norms;
}

}  // namespace

void update_bn(torch::nn::Module& module, const std::function<void()>& forward_all, const UpdateBnOptions& options) {
  const at::NoGradGuard no_grad;
  const std::vector<AveragedNorm> norms = averaged_norms_of(module);
  if (norms.empty()) return;
  std::vector<c10::optional<double>> momenta;
  for (const AveragedNorm& norm : norms) {
    norm.mean.zero_();
    norm.variance.fill_(1);
    norm.batches.zero_();
    momenta.push_back(std::exchange(*norm.momentum, c10::nullopt));  // the mean over all batches
  }
  const bool was_training = module.is_training();
  const auto restore = [&] {
    for (size_t i = norms.size(); i-- > 0;) *norms[i].momentum = momenta[i];  // one may occur twice
    module.train(was_training);
  };
  module.train();
  try {
    forward_all();
  } catch (...) {
    restore();
    throw;
  }
  restore();
  if (!options.group) return;
  for (const AveragedNorm& norm : norms)
    for (at::Tensor statistics : {norm.mean, norm.variance})
      all_reduce(statistics, {.op = ReduceOp::AVG, .group = *options.group});
}

}  // namespace muster
