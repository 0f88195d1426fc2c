#include "parallel/ddp/replica.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "parallel/batch_norm/whole_batch_norm.h"
#include "parallel/kit/bucket_size.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/compute_copy.h"

namespace muster::ddp {

namespace {

// Where the tensors of an option's names are. InvalidArgument, which says `lack`, for a name that is not there.
std::vector<size_t> indices_of(const std::vector<std::string>& names, const std::vector<parallel::NamedTensor>& tensors,
                               const char* option, const char* lack) {
  std::vector<size_t> indices;
  for (const std::string& name : names) {
    const auto found = std::find_if(tensors.begin(), tensors.end(),
                                    [&](const parallel::NamedTensor& each) { return each.name == name; });
    if (found == tensors.end())
      throw InvalidArgument(text("DdpOptions::", option, " has ", name, ", which ", lack),
                            "Use names as in named_parameters() and named_buffers()");
    indices.push_back(static_cast<size_t>(found - tensors.begin()));
  }
  return indices;
}

void ignore(const std::vector<std::string>& names, parallel::ModuleTensors& tensors) {
  std::vector<at::Tensor> ignored;
  for (const size_t index : indices_of(names, tensors.all, "ignored", "the module does not have"))
    ignored.push_back(tensors.all[index].tensor);
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

// By parameter. Empty if there is none.
std::vector<bool> delayed(const std::vector<std::string>& names, const std::vector<parallel::NamedTensor>& trainable) {
  std::vector<bool> all(names.empty() ? 0 : trainable.size());
  for (const size_t index : indices_of(names, trainable, "delay_all_reduce", "is not a trained parameter"))
    all[index] = true;
  return all;
}

}  // namespace

std::vector<parallel::NamedTensor> Replica::Impl::equal_buffers() const {
  if (options.broadcast_buffers) return {};  // they become rank 0's before each forward() in training
  const auto own = parallel::statistics_of_own_batches(*module, group);
  std::vector<parallel::NamedTensor> equal = buffers;
  for (auto& [name, buffer] : equal)
    if (std::any_of(own.begin(), own.end(), [&](const at::Tensor& each) { return each.is_same(buffer); }))
      buffer = at::Tensor();
  return equal;
}

void Replica::Impl::require_no_synchronized_norm(const char* of) const {
  if (parallel::has_synchronized_norm(*module))
    throw InvalidArgument(text("the module has a synchronized batch norm, which does not go with ", of),
                          "Use BatchNorm, which each rank computes by itself");
}

Replica::Replica(std::shared_ptr<torch::nn::Module> module, DdpOptions options) : impl_(std::make_shared<Impl>()) {
  if (!module) throw InvalidArgument("DistributedDataParallel needs a module, got null");
  Impl& s = *impl_;
  s.module = std::move(module);
  s.options = std::move(options);
  World& world = World::current();
  auto with = parallel::reducer_options("DistributedDataParallel", s.options);
  s.group = with.group;

  const MixedPrecision& precision = s.options.mixed_precision;
  parallel::check(precision);
  with.static_graph = s.options.static_graph;
  if (with.static_graph && with.find_unused_parameters)
    throw InvalidArgument("DdpOptions::static_graph does not go with DdpOptions::find_unused_parameters",
                          "Set static_graph, if the same parameters are unused in each step");
  auto tensors = parallel::tensors_of(*s.module);
  const auto computed = tensors.parameters;  // those that are ignored, too
  const auto compute_dtypes = parallel::compute_dtypes(*s.module, computed, precision);
  ignore(s.options.ignored, tensors);
  const auto trainable = tensors.trainable();
  with.sparse = with_sparse_gradients(*s.module, trainable);
  with.delayed = delayed(s.options.delay_all_reduce, trainable);
  with.reduce_dtypes = parallel::reduce_dtypes(*s.module, trainable, precision);
  const bool reduces_in_another =
      std::any_of(with.reduce_dtypes.begin(), with.reduce_dtypes.end(), [](const auto& dtype) { return dtype; });
  const ReproducibleOptions& reproducible = s.options.reproducible;
  parallel::require_same_on_all_ranks(
      tensors.all,
      text(parallel::words_of(with), " bucket_cap_mb is ", s.options.bucket_cap_mb ? "given" : "measured",
           " check_divergence_every=", s.options.check_divergence_every, " reproducible.shards=", reproducible.shards,
           " reproducible.seed=", reproducible.seed, " reproducible.threads=", reproducible.threads,
           " delay_all_reduce=", muster::join(s.options.delay_all_reduce), " init_sync=", s.options.init_sync,
           parallel::words_of(*s.module, precision, compute_dtypes)),
      s.group);
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
  const at::Tensor& first = trainable[0].tensor;
  for (const auto& [name, tensor] : tensors.parameters)
    if (tensor.device() != first.device())
      throw InvalidArgument(text(trainable[0].name, " is on ", first.device().str(), ", and ", name, " on ",
                                 tensor.device().str(), ": a DistributedDataParallel is on one device"),
                            "Move the module with to()");
  if (!first.is_cpu() && (reproducible.shards != 0 || parallel::makes_copies(precision) || reduces_in_another))
    throw InvalidArgument(text(trainable[0].name, " is on ", first.device().str(),
                               ", and DdpOptions::", reproducible.shards != 0 ? "reproducible" : "mixed_precision",
                               " is for modules on the CPU"),
                          "Move the module with to(torch::kCPU), or leave the option out");
  if (reproducible.shards != 0) {
    s.shards.emplace(reproducible.shards, s.group);
    if (reproducible.threads < 1)
      throw InvalidArgument(text("DdpOptions::reproducible.threads: expected 1 or more, got ", reproducible.threads),
                            "Use 1 or more");
    if (reduces_in_another)
      throw InvalidArgument("DdpOptions::reproducible does not go with mixed_precision.reduce_dtype",
                            "Set one of them");
    if (!s.options.ignored.empty() || s.options.static_graph)
      throw InvalidArgument(text("DdpOptions::reproducible does not go with DdpOptions::",
                                 s.options.static_graph ? "static_graph" : "ignored"),
                            "Set one of them");
    if (std::find(with.sparse.begin(), with.sparse.end(), true) != with.sparse.end())
      throw InvalidArgument("DdpOptions::reproducible goes with dense gradients only",
                            "Create the embedding with sparse(false)");
  }
  if (s.options.init_sync) parallel::broadcast_together(tensors.all, s.group);
  parallel::convert_buffers(*s.module, precision);
  if (parallel::makes_copies(precision)) s.copies = std::make_unique<PrivateCopies>(computed, compute_dtypes);
  s.buffers = std::move(tensors.buffers);
  s.everything = std::move(tensors.all);
  with.on_begin = [weak = std::weak_ptr(impl_)](bool with_graph) {
    if (const auto impl = weak.lock(); impl && impl->meetings)
      impl->meet(with_graph ? Meetings::Event::kBackwardWithGraph : Meetings::Event::kBackward);
  };
  s.parameter_watch.emplace("DistributedDataParallel", computed, tensors.parameters);
  for (const auto& [name, tensor] : trainable) s.trainable.push_back(tensor);
  if (const int64_t every = s.options.check_divergence_every; every > 0)
    s.watch.emplace(tensors.parameters, every, s.group);
  with.on_averaged = [weak = std::weak_ptr(impl_)](bool is_complete) {
    const auto impl = weak.lock();
    if (!impl) return;
    if (is_complete) impl->times.end_step(impl->gradients->times());
    if (impl->watch && !impl->meetings)  // ranks without data do not step
      impl->watch->after_backward(is_complete, [&] { return impl->equal_buffers(); });
  };
  const auto heap = world.shared_heap();
  if (!s.options.bucket_cap_mb && first.is_cpu() && parallel::exceed_first_bucket(trainable, with))
    with.bucket_cap_mb = parallel::measured_bucket_mib(s.group, *heap);
  s.gradients.emplace(trainable, std::move(with), heap);
}

Replica::~Replica() = default;

class Replica::InForward {
 public:
  explicit InForward(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {
    if (impl_->copies) with_copies_.emplace(impl_->copies->phase());
    impl_->times.begin_forward();
  }
  InForward(const InForward&) = delete;
  InForward& operator=(const InForward&) = delete;
  ~InForward() { impl_->times.end_forward(); }

 private:
  const std::shared_ptr<Impl> impl_;
  std::optional<parallel::ForwardWithCopies> with_copies_;
};

std::shared_ptr<void> Replica::before_forward() {
  Impl& s = *impl_;
  s.gradients->before_forward();
  s.check_parameters();
  if (s.gradients->sync() && s.broadcasts()) {
    const int root = s.meetings ? s.meet(Meetings::Event::kForward).active[0] : 0;
    parallel::broadcast_together(s.buffers, s.group, root);
  }
  if (s.copies) s.copies->make();
  return std::make_shared<InForward>(impl_);
}

std::optional<at::ScalarType> Replica::input_dtype() const {
  const MixedPrecision& precision = impl_->options.mixed_precision;
  return precision.cast_forward_inputs ? precision.param_dtype : std::nullopt;
}
std::optional<at::ScalarType> Replica::output_dtype() const { return impl_->options.mixed_precision.output_dtype; }

DdpLoggingData Replica::logging_data() const {
  const Impl& s = *impl_;
  DdpLoggingData data{.world_size = s.group.size(),
                      .rank = s.group.rank(),
                      .module_name = s.module->name(),
                      .parameters = s.trainable.size(),
                      .bucket_cap_mb = s.gradients->bucket_cap_mb(),
                      .bucket_bytes = s.gradients->bucket_bytes(),
                      .has_rebuilt_buckets = s.gradients->has_rebuilt_buckets(),
                      .has_comm_hook = s.gradients->has_hook()};
  for (const at::Tensor& parameter : s.trainable) data.parameter_bytes += parameter.nbytes();
  s.times.write(data);
  return data;
}

void Replica::register_comm_hook(CommHook hook) { impl_->gradients->set_hook(std::move(hook)); }
bool Replica::set_sync(bool on) { return impl_->gradients->set_sync(on); }
std::vector<std::vector<std::string>> Replica::bucket_names() const { return impl_->gradients->bucket_names(); }

}  // namespace muster::ddp
