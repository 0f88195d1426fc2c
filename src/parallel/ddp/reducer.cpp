#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <optional>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/parallel/ddp.h"
#include "parallel/gradient_reducer.h"
#include "parallel/shared_tensor.h"

namespace muster::ddp {

namespace {

void ignore(const std::vector<std::string>& names, parallel::ModuleTensors& tensors) {
  std::vector<at::Tensor> ignored;
  for (const std::string& name : names) {
    const auto found = std::find_if(tensors.all.begin(), tensors.all.end(),
                                    [&](const parallel::NamedTensor& each) { return each.name == name; });
    if (found == tensors.all.end())
      throw InvalidArgument(text("DdpOptions::ignored has ", name, ", which the module does not have"),
                            "Use names as in named_parameters() and named_buffers()");
    ignored.push_back(found->tensor);
  }
  for (auto* const list : {&tensors.all, &tensors.parameters, &tensors.buffers})
    std::erase_if(*list, [&](const parallel::NamedTensor& each) {
      return std::any_of(ignored.begin(), ignored.end(),
                         [&](const at::Tensor& tensor) { return tensor.is_same(each.tensor); });
    });
}

std::vector<bool> with_sparse_gradients(torch::nn::Module& module,
                                        const std::vector<parallel::NamedTensor>& parameters) {
  std::vector<at::Tensor> sparse;
  module.apply([&](torch::nn::Module& each) {
    if (const auto* const one = dynamic_cast<torch::nn::EmbeddingImpl*>(&each); one && one->options.sparse())
      sparse.push_back(one->weight);
    if (const auto* const bag = dynamic_cast<torch::nn::EmbeddingBagImpl*>(&each); bag && bag->options.sparse())
      sparse.push_back(bag->weight);
  });
  std::vector<bool> is_sparse;
  for (const auto& [name, tensor] : parameters)
    is_sparse.push_back(std::any_of(sparse.begin(), sparse.end(),
                                    [&, &of = tensor](const at::Tensor& weight) { return weight.is_same(of); }));
  return is_sparse;
}

}  // namespace

struct Reducer::Impl {
  std::shared_ptr<torch::nn::Module> module;
  DdpOptions options;
  Group group;  // resolved
  std::vector<parallel::NamedTensor> buffers;
  std::optional<parallel::GradientReducer> gradients;
};

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, DdpOptions options) : impl_(std::make_unique<Impl>()) {
  if (!module) throw InvalidArgument("DistributedDataParallel needs a module, got null");
  Impl& s = *impl_;
  s.module = std::move(module);
  s.options = std::move(options);
  World& world = World::current();
  auto with = parallel::reducer_options("DistributedDataParallel", s.options);
  s.group = with.group;

  auto tensors = parallel::tensors_of(*s.module);
  ignore(s.options.ignored, tensors);
  parallel::require_same_on_all_ranks(tensors.all, parallel::words_of(with), s.group);
  const auto trainable = tensors.trainable();
  if (trainable.empty())
    throw InvalidArgument("the module has no parameter that requires grad", "Use it without DistributedDataParallel");
  for (const auto& [name, tensor] : tensors.all)
    if (tensor.is_meta())
      throw InvalidArgument(text(name, " has no values, because it was made on the device meta"),
                            "Make the module without on_meta(), or use FullyShardedDataParallel");
  for (const auto& [name, tensor] : tensors.parameters)
    if (s.group.size() > 1 && parallel::is_shared(tensor))
      throw InvalidArgument(text("FullyShardedDataParallel has shared parameter ", name, " among the ranks"),
                            "Use FullyShardedDataParallel again, or make the module anew");
  parallel::broadcast_from_first(tensors.all, s.group);
  s.buffers = std::move(tensors.buffers);
  with.sparse = with_sparse_gradients(*s.module, trainable);
  s.gradients.emplace(trainable, std::move(with), world.shared_heap());
}

Reducer::~Reducer() = default;

void Reducer::before_forward() {
  Impl& s = *impl_;
  s.gradients->before_forward();
  if (s.gradients->sync() && s.options.broadcast_buffers && s.module->is_training() && !s.buffers.empty())
    parallel::broadcast_from_first(s.buffers, s.group);
}

void Reducer::register_comm_hook(CommHook hook) { impl_->gradients->set_hook(std::move(hook)); }
bool Reducer::set_sync(bool on) { return impl_->gradients->set_sync(on); }
std::vector<std::vector<std::string>> Reducer::bucket_names() const { return impl_->gradients->bucket_names(); }

}  // namespace muster::ddp
