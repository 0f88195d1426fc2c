#include "muster/data/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"

namespace muster {

// `wanted_epoch` is the epoch that the next reset() begins; set_epoch() sets it. `epoch` is the one under way.
struct DistributedSampler::State {
  size_t dataset_size = 0;
  size_t replicas = 1, rank = 0;
  bool shuffle = true, drop_last = false, pad = true;
  uint64_t seed = 0;

  uint64_t wanted_epoch = 0;
  uint64_t epoch = 0;
  size_t index = 0;
  bool begun = false;    // reset() or next() has been called for this epoch
  bool resumed = false;  // load() or seek() has set the position, and the next reset() keeps it
  at::Tensor order;      // permutation of the dataset; undefined without shuffle

  size_t size() const {
    if (!pad) return dataset_size / replicas + (rank < dataset_size % replicas ? 1 : 0);
    return dataset_size / replicas + (!drop_last && dataset_size % replicas != 0 ? 1 : 0);
  }

  void begin(uint64_t new_epoch, size_t new_index) {
    epoch = new_epoch;
    index = new_index;
    begun = true;
    order = at::Tensor();
    if (shuffle && dataset_size > 0) {
      const auto generator = at::make_generator<at::CPUGeneratorImpl>(seed + epoch);
      order = at::randperm(static_cast<int64_t>(dataset_size), generator, at::TensorOptions().dtype(at::kLong));
    }
  }

  // Lets the next reset() begin at this position.
  void resume(uint64_t at_epoch, size_t at_index) {
    epoch = wanted_epoch = at_epoch;
    index = at_index;
    begun = false;
    resumed = true;
  }

  // The size of the rank that has the most samples.
  size_t longest() const { return pad ? size() : (dataset_size + replicas - 1) / replicas; }

  // This rank's k-th sample. Padding needs nothing but the wrap-around.
  size_t sample(size_t k, const int64_t* permutation) const {
    const size_t place = (rank + k * replicas) % dataset_size;
    return permutation != nullptr ? static_cast<size_t>(permutation[place]) : place;
  }

  // The options that must be equal for a saved position to be valid here.
  std::array<std::pair<const char*, int64_t>, 6> identity() const {
    return {{{"dataset_size", static_cast<int64_t>(dataset_size)},
             {"replicas", static_cast<int64_t>(replicas)},
             {"shuffle", shuffle},
             {"seed", static_cast<int64_t>(seed)},
             {"drop_last", drop_last},
             {"pad", pad}}};
  }
};

namespace {

constexpr const char* kKind = "distributed_sampler";
constexpr int64_t kVersion = 1;

int64_t read_number(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  if (!archive.try_read(key, value) || !value.isInt()) {
    throw CorruptError(text("the archive does not hold a DistributedSampler: its number \"", key, "\" is missing"),
                       "Load the archive that DistributedSampler::save() wrote");
  }
  return value.toInt();
}

}  // namespace

DistributedSampler::DistributedSampler(size_t size, const DistributedSamplerOptions& options)
    : state_(std::make_shared<State>()) {
  const int replicas = options.num_replicas ? *options.num_replicas : World::current().world_size();
  const int rank = options.rank ? *options.rank : World::current().rank();
  if (replicas < 1) {
    throw InvalidArgument(text("DistributedSampler: num_replicas must be at least 1, got ", replicas));
  }
  if (rank < 0 || rank >= replicas) {
    throw InvalidArgument(text("DistributedSampler: rank ", rank, " is not among ", replicas, " replicas"),
                          text("Ranks are 0 to ", replicas - 1));
  }
  if (options.drop_last && !options.pad) {
    throw InvalidArgument("DistributedSampler: drop_last leaves samples out, but pad = false keeps all of them",
                          "Choose one of the two");
  }
  state_->dataset_size = size;
  state_->replicas = static_cast<size_t>(replicas);
  state_->rank = static_cast<size_t>(rank);
  state_->shuffle = options.shuffle;
  state_->seed = options.seed;
  state_->drop_last = options.drop_last;
  state_->pad = options.pad;
}

void DistributedSampler::set_epoch(uint64_t epoch) { state_->wanted_epoch = epoch; }
void DistributedSampler::seek(uint64_t epoch, size_t index) {
  if (index > state_->size())
    throw InvalidArgument(text("DistributedSampler: cannot seek to sample ", index, " of ", state_->size()),
                          "Seek within the samples of this rank");
  state_->resume(epoch, index);
}
uint64_t DistributedSampler::epoch() const { return state_->wanted_epoch; }
size_t DistributedSampler::size() const { return state_->size(); }
size_t DistributedSampler::index() const { return state_->index; }

void DistributedSampler::reset(std::optional<size_t> new_size) {
  auto& state = *state_;
  const bool same_size = !new_size || *new_size == state.dataset_size;
  if (new_size) state.dataset_size = *new_size;
  const bool go_on = std::exchange(state.resumed, false) && state.wanted_epoch == state.epoch && same_size;
  state.begin(state.wanted_epoch, go_on ? state.index : 0);
}

std::optional<std::vector<size_t>> DistributedSampler::next(size_t batch_size) {
  if (batch_size == 0) throw InvalidArgument("DistributedSampler: the batch size must be at least 1, got 0");
  auto& state = *state_;
  if (!state.begun) reset();
  const size_t count = std::min(batch_size, state.size() - state.index);
  if (count == 0) return std::nullopt;
  const int64_t* permutation = state.order.defined() ? state.order.const_data_ptr<int64_t>() : nullptr;
  std::vector<size_t> batch(count);
  for (auto& sample : batch) sample = state.sample(state.index++, permutation);
  return batch;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto& state = *state_;
  const bool under_way = state.begun || state.resumed;
  archive.write(kKind, c10::IValue(kVersion));
  for (const auto& [name, value] : state.identity()) archive.write(name, c10::IValue(value));
  archive.write("epoch", c10::IValue(static_cast<int64_t>(under_way ? state.epoch : state.wanted_epoch)));
  archive.write("index", c10::IValue(static_cast<int64_t>(under_way ? state.index : 0)));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  auto& state = *state_;
  if (const auto version = read_number(archive, kKind); version != kVersion) {
    throw CorruptError(
        text("the archive holds a DistributedSampler of version ", version, ", but this is version ", kVersion));
  }
  for (const auto& [name, value] : state.identity()) {
    if (const auto saved = read_number(archive, name); saved != value) {
      throw InvalidArgument(text("the saved DistributedSampler has ", name, " ", saved, ", this one ", value),
                            "A position in an epoch can only be resumed with the same dataset and options");
    }
  }
  const auto epoch = read_number(archive, "epoch");
  const auto index = read_number(archive, "index");
  if (index < 0 || static_cast<size_t>(index) > state.longest()) {
    throw CorruptError(text("the saved DistributedSampler is at sample ", index, " of ", state.longest()));
  }
  state.resume(static_cast<uint64_t>(epoch), std::min(static_cast<size_t>(index), state.size()));
}

}  // namespace muster
