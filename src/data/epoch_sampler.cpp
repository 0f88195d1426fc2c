#include "muster/data/epoch_sampler.h"

#include <utility>

#include "data/epoch_order.h"

namespace muster {

EpochSampler::EpochSampler(std::shared_ptr<data::EpochOrder> order) : order_(std::move(order)) {}

void EpochSampler::set_epoch(uint64_t epoch) { order_->set_epoch(epoch); }
uint64_t EpochSampler::epoch() const { return order_->epoch(); }
void EpochSampler::seek(uint64_t epoch, size_t index) { order_->seek(epoch, index); }
size_t EpochSampler::size() const { return order_->size(); }
size_t EpochSampler::index() const { return order_->index(); }
int EpochSampler::rank() const { return static_cast<int>(order_->share().rank); }
int EpochSampler::num_replicas() const { return static_cast<int>(order_->share().replicas); }

void EpochSampler::reset(std::optional<size_t> new_size) { order_->reset(new_size); }
std::optional<std::vector<size_t>> EpochSampler::next(size_t batch_size) { return order_->next(batch_size); }

void EpochSampler::save(torch::serialize::OutputArchive& archive) const { order_->save(archive); }
void EpochSampler::load(torch::serialize::InputArchive& archive) { order_->load(archive); }
void EpochSampler::save_at(torch::serialize::OutputArchive& archive, uint64_t epoch, size_t index) const {
  order_->save_at(archive, epoch, index);
}

}  // namespace muster
