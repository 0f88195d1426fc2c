#include "parallel/ddp/shard_states.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::ddp {
namespace {

namespace autograd = torch::autograd::impl;

// How the bytes of its memory are the tensor's values.
auto form_of(const at::Tensor& tensor) {
  return std::tuple(tensor.scalar_type(), tensor.sizes(), tensor.strides(), tensor.is_conj(), tensor.is_neg());
}

bool have_same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl() &&
         a.storage_offset() == b.storage_offset() && form_of(a) == form_of(b);
}

// Without a new version, also of what else has the memory.
void copy_values(const at::Tensor& to, const at::Tensor& from) {
  if (to.is_non_overlapping_and_dense() && form_of(to) == form_of(from))
    copy_bytes(to.mutable_data_ptr(), from.const_data_ptr(), to.nbytes());
  else
    to.variable_data().copy_(from);
}

}  // namespace

BuffersBefore::BuffersBefore(const std::vector<parallel::NamedTensor>& buffers) {
  const at::NoGradGuard values_only;
  for (const auto& [name, tensor] : buffers)
    buffers_.push_back({.name = name, .tensor = tensor, .as_before = tensor.detach(), .values = tensor.clone()});
}

void BuffersBefore::require_same_memory() const {
  for (const Buffer& buffer : buffers_)
    if (!have_same_memory(buffer.tensor, buffer.as_before))
      throw InvalidArgument(text("the function of backward_by_shards() gave buffer ", buffer.name,
                                 " other memory, another shape or another dtype"),
                            "Write into it what is new, as copy_() does");
}

void BuffersBefore::restore_memory() const {
  for (const Buffer& buffer : buffers_)
    if (!have_same_memory(buffer.tensor, buffer.as_before)) buffer.tensor.set_data(buffer.as_before);
}

void BuffersBefore::restore() const {
  const at::NoGradGuard values_only;
  restore_memory();
  for (const Buffer& buffer : buffers_) buffer.tensor.copy_(buffer.values);
}

ShardStates::ShardStates(const std::vector<parallel::NamedTensor>& buffers, const BuffersBefore& before,
                         std::shared_ptr<parallel::CopyPhase> copies, size_t shards)
    : before_(before), copies_(std::move(copies)), states_(shards) {
  if (shards == 1) return;                 // nobody else writes between its turns
  std::map<const void*, size_t> counters;  // by storage
  for (const auto& [name, tensor] : buffers) {
    const auto [at, is_new] = counters.emplace(tensor.storage().unsafeGetStorageImpl(), counters.size());
    buffers_.push_back({.tensor = tensor, .version = autograd::version_counter(tensor), .counter = at->second});
    if (!is_new) continue;
    for (State& state : states_) state.counters.emplace_back(static_cast<uint32_t>(tensor._version()));
  }
}

ShardStates::~ShardStates() {
  for (Buffer& buffer : buffers_) {
    for (const State& state : states_)
      while (buffer.version.current_version() <= state.counters[buffer.counter].current_version())
        buffer.version.bump();
    autograd::set_version_counter(buffer.tensor, buffer.version);
  }
}

void ShardStates::begin_turn(size_t shard) {
  const at::NoGradGuard no_grad;
  State& state = states_[shard];
  before_.restore_memory();  // another shard may have changed it, which has failed then
  if (copies_) copies_->forwards = state.forwards;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    autograd::set_version_counter(buffer.tensor, buffer.version);
    if (!state.values.empty()) copy_values(buffer.tensor, state.values[i]);
    autograd::set_version_counter(buffer.tensor, state.counters[buffer.counter]);
  }
  if (state.random) state.random->set();
  at::autocast::clear_cache();  // which is the process's: a shard's casts belong to its graph
}

void ShardStates::end_turn(size_t shard) {
  const at::NoGradGuard no_grad;
  State& state = states_[shard];
  if (copies_) state.forwards = std::exchange(copies_->forwards, 0);
  before_.require_same_memory();
  if (state.values.empty()) {
    std::vector<at::Tensor> values;
    for (const Buffer& buffer : buffers_) values.push_back(buffer.tensor.detach().clone());
    state.values = std::move(values);
  } else {
    for (size_t i = 0; i < buffers_.size(); ++i) copy_values(state.values[i], buffers_[i].tensor);
  }
  state.random.emplace(parallel::RandomState::of_cpu());
}

}  // namespace muster::ddp
