#include <optional>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/parallel/ddp.h"
#include "parallel/gradient_reducer.h"
#include "parallel/shared_tensor.h"

namespace muster::ddp {

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
  s.gradients.emplace(trainable, std::move(with), world.shared_heap());
}

Reducer::~Reducer() = default;

void Reducer::before_forward() {
  Impl& s = *impl_;
  s.gradients->before_forward();
  if (s.gradients->sync() && s.options.broadcast_buffers && s.module->is_training() && !s.buffers.empty())
    parallel::broadcast_from_first(s.buffers, s.group);
}

bool Reducer::set_sync(bool on) { return impl_->gradients->set_sync(on); }
std::vector<std::vector<std::string>> Reducer::bucket_names() const { return impl_->gradients->bucket_names(); }

}  // namespace muster::ddp
