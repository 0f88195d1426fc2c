#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <optional>

#include "base/auto_reset.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/parallel/ddp.h"
#include "parallel/coalesced.h"
#include "parallel/ddp/divergence.h"
#include "parallel/ddp/join.h"
#include "parallel/ddp/shards.h"
#include "parallel/gradient_reducer.h"
#include "parallel/shared_tensor.h"
#include "parallel/whole_batch_norm.h"

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

// A seed for each shard of each step: the finalizer of MurmurHash3, on numbers that differ.
uint64_t seed_of(uint64_t seed, uint64_t step, int shard) {
  uint64_t x = 0;
  for (const uint64_t next : {seed, step, static_cast<uint64_t>(shard)}) {
    x += next + 0x9e3779b97f4a7c15U;
    for (const uint64_t factor : {uint64_t{0xff51afd7ed558ccd}, uint64_t{0xc4ceb9fe1a85ec53}}) {
      x ^= x >> 33;
      x *= factor;
    }
    x ^= x >> 33;
  }
  return x;
}

void require_no_synchronized_norm(torch::nn::Module& module, const char* of) {
  if (parallel::has_synchronized_norm(module))
    throw InvalidArgument(text("the module has a synchronized batch norm, which does not go with ", of),
                          "Use BatchNorm, which each rank computes by itself");
}

// All ranks throw, or none.
void throw_if_any_failed(const std::exception_ptr& failure, const Group& group, const std::function<void()>& clean_up) {
  int64_t rank = failure ? group.rank() : -1;
  all_reduce(at::from_blob(&rank, {1}, at::kLong), {.op = ReduceOp::MAX, .group = group});
  if (rank < 0) return;
  clean_up();
  if (failure) std::rethrow_exception(failure);
  throw InvalidArgument(
      text("the function of backward_by_shards() has thrown on rank ", group.global_rank(static_cast<int>(rank))),
      "Look at what that rank says");
}

// Libtorch's default generator and number of threads, which are as before when the guard has ended.
class SameEverywhere {
 public:
  explicit SameEverywhere(int threads)
      : generator_(at::detail::getDefaultCPUGenerator()), threads_(at::get_num_threads()) {
    const std::lock_guard lock(generator_.mutex());
    state_ = generator_.get_state();
    if (threads != threads_) at::set_num_threads(threads);
  }
  SameEverywhere(const SameEverywhere&) = delete;
  SameEverywhere& operator=(const SameEverywhere&) = delete;
  ~SameEverywhere() {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state_);
    if (at::get_num_threads() != threads_) at::set_num_threads(threads_);
  }
  void set_seed(uint64_t seed) {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
  }

 private:
  at::Generator generator_;
  const int threads_;
  at::Tensor state_;
};

}  // namespace

struct Reducer::Impl {
  std::shared_ptr<torch::nn::Module> module;
  DdpOptions options;
  Group group;  // resolved
  std::vector<parallel::NamedTensor> buffers;
  std::vector<parallel::NamedTensor> everything;  // parameters and buffers
  std::vector<at::Tensor> trainable;
  std::optional<parallel::GradientReducer> gradients;
  std::optional<Shards> shards;
  std::optional<Meetings> meetings;  // within join()

  bool broadcasts() const { return options.broadcast_buffers && module->is_training() && !buffers.empty(); }
  Meetings::Meeting meet(Meetings::Event mine) {
    const auto meeting = meetings->meet(mine);
    if (!meeting.active.empty())
      gradients->set_contributors(static_cast<int>(meeting.active.size()),
                                  !meetings->options().divide_by_initial_world_size);
    return meeting;
  }
};

Reducer::Reducer(std::shared_ptr<torch::nn::Module> module, DdpOptions options) : impl_(std::make_shared<Impl>()) {
  if (!module) throw InvalidArgument("DistributedDataParallel needs a module, got null");
  Impl& s = *impl_;
  s.module = std::move(module);
  s.options = std::move(options);
  World& world = World::current();
  auto with = parallel::reducer_options("DistributedDataParallel", s.options);
  s.group = with.group;

  auto tensors = parallel::tensors_of(*s.module);
  ignore(s.options.ignored, tensors);
  const auto trainable = tensors.trainable();
  with.sparse = with_sparse_gradients(*s.module, trainable);
  const ReproducibleOptions& reproducible = s.options.reproducible;
  parallel::require_same_on_all_ranks(
      tensors.all,
      text(parallel::words_of(with), " check_divergence_every=", s.options.check_divergence_every,
           " reproducible.shards=", reproducible.shards, " reproducible.seed=", reproducible.seed,
           " reproducible.threads=", reproducible.threads),
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
  parallel::broadcast_together(tensors.all, s.group);
  s.buffers = std::move(tensors.buffers);
  s.everything = std::move(tensors.all);
  with.on_begin = [weak = std::weak_ptr(impl_)](bool with_graph) {
    if (const auto impl = weak.lock(); impl && impl->meetings)
      impl->meet(with_graph ? Meetings::Event::kBackwardWithGraph : Meetings::Event::kBackward);
  };
  if (reproducible.shards != 0) {
    s.shards.emplace(reproducible.shards, s.group);
    if (!s.options.ignored.empty())
      throw InvalidArgument("DdpOptions::reproducible does not go with DdpOptions::ignored", "Set one of them");
    if (std::find(with.sparse.begin(), with.sparse.end(), true) != with.sparse.end())
      throw InvalidArgument("DdpOptions::reproducible goes with dense gradients only",
                            "Create the embedding with sparse(false)");
  }
  for (const auto& [name, tensor] : trainable) s.trainable.push_back(tensor);
  if (const int64_t every = s.options.check_divergence_every; every > 0)
    with.on_averaged = [weak = std::weak_ptr(impl_), watch = std::make_shared<DivergenceWatch>(
                                                         tensors.parameters, every, s.group)](bool is_complete) {
      const auto impl = weak.lock();
      if (impl && !impl->meetings) watch->after_backward(is_complete);  // ranks without data do not step
    };
  s.gradients.emplace(trainable, std::move(with), world.shared_heap());
}

Reducer::~Reducer() = default;

void Reducer::before_forward() {
  Impl& s = *impl_;
  s.gradients->before_forward();
  if (!s.gradients->sync() || !s.broadcasts()) return;
  const int root = s.meetings ? s.meet(Meetings::Event::kForward).active[0] : 0;
  parallel::broadcast_together(s.buffers, s.group, root);
}

void Reducer::join(const std::function<void()>& body, JoinOptions options) {
  Impl& s = *impl_;
  thread_local bool is_in_join = false;
  if (is_in_join) throw InvalidArgument("join() is called within join()", "Join one DistributedDataParallel at a time");
  const AutoReset<bool> in_join(is_in_join, true);
  require_no_synchronized_norm(*s.module, "join(), because ranks without data do not call its layers");
  s.gradients->before_forward();
  s.meetings.emplace(s.group, std::move(options));
  struct End {
    Impl& s;
    ~End() {
      s.meetings.reset();
      s.gradients->set_contributors(s.group.size(), false);
    }
  } const end{s};
  try {
    body();
  } catch (...) {
    try {
      s.gradients->before_forward();  // makes up for a backward() that threw, within join() as on the other ranks
    } catch (const std::exception&) {
      // The error of `body` says more.
    }
    throw;
  }
  s.gradients->before_forward();
  std::exception_ptr failure;  // what the other ranks' backward() threw, too, who may go on
  for (;;) {
    const auto meeting = s.meet(Meetings::Event::kNoData);
    if (meeting.active.empty()) break;
    if (meeting.event == Meetings::Event::kForward) {
      parallel::broadcast_together(s.buffers, s.group, meeting.active[0]);
      continue;
    }
    try {
      s.gradients->backward_without_data();
    } catch (const InvalidArgument&) {
      if (!failure) failure = std::current_exception();
      continue;
    }
    if (s.meetings->options().after_backward) s.meetings->options().after_backward();
  }
  const at::NoGradGuard no_grad;
  parallel::broadcast_together(s.everything, s.group, s.meetings->last_active());
  if (failure) std::rethrow_exception(failure);
}

void Reducer::register_comm_hook(CommHook hook) { impl_->gradients->set_hook(std::move(hook)); }
bool Reducer::set_sync(bool on) { return impl_->gradients->set_sync(on); }
std::vector<int> Reducer::shards() const { return impl_->shards ? impl_->shards->mine() : std::vector<int>(); }

at::Tensor Reducer::backward_by_shards(uint64_t step, const std::function<at::Tensor(int shard)>& loss) {
  Impl& s = *impl_;
  if (!s.shards)
    throw InvalidArgument("backward_by_shards() is called, but DdpOptions::reproducible has no shards",
                          "Set DdpOptions::reproducible.shards");
  if (s.meetings)
    throw InvalidArgument("backward_by_shards() is called within join()", "Give each shard as many batches");
  require_no_synchronized_norm(*s.module, "backward_by_shards(), because its batches depend on the number of ranks");
  s.gradients->before_forward();  // makes up for a backward() that threw
  SameEverywhere same(s.options.reproducible.threads);
  std::vector<at::Tensor> buffers_before;
  for (const auto& [name, buffer] : s.buffers) buffers_before.push_back(buffer.clone());
  const auto restore_buffers = [&] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < s.buffers.size(); ++i) s.buffers[i].tensor.copy_(buffers_before[i]);
  };
  const auto is_averaged = [](const parallel::NamedTensor& buffer) {
    return buffer.tensor.is_floating_point() || buffer.tensor.is_complex();
  };
  TreeSum sum;
  std::exception_ptr failure;
  try {
    for (const int shard : s.shards->mine()) {
      restore_buffers();
      same.set_seed(seed_of(s.options.reproducible.seed, step, shard));
      const at::Tensor value = loss(shard);
      if (!value.defined() || value.numel() != 1 || !value.requires_grad())
        throw InvalidArgument("the function of backward_by_shards() returned something that is not a loss",
                              "Return a tensor with one element that depends on the parameters");
      TreeSum::Leaf leaf = torch::autograd::grad({value}, s.trainable, {}, {}, false, /*allow_unused=*/true);
      for (const auto& buffer : s.buffers)
        if (is_averaged(buffer)) leaf.push_back(buffer.tensor);
      leaf.push_back(value.detach().reshape({}));
      // Before sums, which might be infinite; exact, because the number of shards is a power of two.
      for (at::Tensor& tensor : leaf)
        if (tensor.defined()) tensor = at::mul(tensor.detach(), 1.0 / s.shards->count());
      sum.add(std::move(leaf));
    }
  } catch (const std::exception&) {
    failure = std::current_exception();
  }
  throw_if_any_failed(failure, s.group, restore_buffers);

  const at::NoGradGuard no_grad;
  TreeSum::Leaf total = std::move(sum).total();
  const auto rest = total.begin() + static_cast<std::ptrdiff_t>(s.trainable.size());
  const std::vector<at::Tensor> averages(rest, total.end());
  total.erase(rest, total.end());
  const auto average = [&](const at::Tensor& part) { s.shards->add_other_ranks(part); };
  parallel::change_coalesced(averages, average);
  size_t next = 0;
  std::vector<parallel::NamedTensor> others;
  for (const auto& buffer : s.buffers) {
    if (is_averaged(buffer))
      buffer.tensor.copy_(averages[next++]);
    else
      others.push_back(buffer);
  }
  parallel::broadcast_together(others, s.group, s.group.size() - 1);  // as after the last shard
  s.gradients->add_gradients(total, average);
  return averages.back();
}

std::vector<std::vector<std::string>> Reducer::bucket_names() const { return impl_->gradients->bucket_names(); }

}  // namespace muster::ddp
