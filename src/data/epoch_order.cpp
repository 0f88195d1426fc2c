#include "data/epoch_order.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::data {

Identity EpochOrder::identity(size_t replicas) const {
  Identity all = {{"dataset_size", static_cast<int64_t>(settings_.dataset_size)},
                  {"replicas", static_cast<int64_t>(replicas)}};
  all.insert(all.end(), settings_.options.begin(), settings_.options.end());
  all.insert(all.end(), {{"seed", static_cast<int64_t>(settings_.seed)},
                         {"drop_last", settings_.share.drop_last},
                         {"pad", settings_.share.pad}});
  return all;
}

void EpochOrder::set_epoch(uint64_t epoch) {
  const std::scoped_lock lock(mutex_);
  position_.set_epoch(epoch);
}

uint64_t EpochOrder::epoch() const {
  const std::scoped_lock lock(mutex_);
  return position_.wanted();
}

void EpochOrder::seek(uint64_t epoch, size_t index) {
  const std::scoped_lock lock(mutex_);
  if (const size_t size = settings_.share.size(items()); index > size) {
    throw InvalidArgument(
        text(settings_.type, ": position: expected at most ", size, " ", settings_.item, "s, got ", index),
        "Seek to at most the end of this rank's part of the epoch");
  }
  position_.resume(epoch, index);
}

size_t EpochOrder::size() const {
  const std::scoped_lock lock(mutex_);
  return settings_.share.size(items());
}

size_t EpochOrder::index() const {
  const std::scoped_lock lock(mutex_);
  return position_.index();
}

// Changes nothing if `draw` throws.
void EpochOrder::begin(size_t dataset_size) {
  auto position = position_;
  position.begin(dataset_size == settings_.dataset_size);
  at::Tensor order;
  if (settings_.draw && settings_.items.value_or(dataset_size) > 0)
    order = settings_.draw(position.epoch(), dataset_size);
  settings_.dataset_size = dataset_size;
  position_ = position;
  order_ = std::move(order);
}

void EpochOrder::reset(std::optional<size_t> new_size) {
  const std::scoped_lock lock(mutex_);
  const size_t size = new_size.value_or(settings_.dataset_size);
  if (size != settings_.dataset_size && settings_.items) {
    throw InvalidArgument(text(settings_.type, ": reset(): expected ", settings_.dataset_size,
                               " samples, as it was made for, got ", size),
                          "Make a sampler for the new dataset");
  }
  begin(size);
}

std::optional<std::vector<size_t>> EpochOrder::next(size_t count, const Convert& convert) {
  if (count == 0) throw InvalidArgument(text(settings_.type, ": the batch size: expected 1 or more, got 0"));
  const std::scoped_lock lock(mutex_);
  if (!position_.begun()) begin(settings_.dataset_size);
  const size_t size = settings_.share.size(items());
  std::vector<size_t> batch(std::min(count, size - std::min(size, position_.index())));
  if (batch.empty()) return std::nullopt;
  const int64_t* const order = order_.defined() ? order_.const_data_ptr<int64_t>() : nullptr;
  size_t k = position_.index();
  for (size_t& item : batch) {
    const size_t place = settings_.share.place(k++, items());
    item = order != nullptr ? static_cast<size_t>(order[place]) : place;
  }
  position_.advance(batch.size());
  return convert ? convert(batch) : std::move(batch);
}

void EpochOrder::save(torch::serialize::OutputArchive& archive) const {
  const std::scoped_lock lock(mutex_);
  position_.save(archive, {settings_.type, settings_.archive}, identity(settings_.share.replicas));
}

void EpochOrder::save_at(torch::serialize::OutputArchive& archive, uint64_t epoch, size_t index) const {
  const std::scoped_lock lock(mutex_);
  EpochPosition::save_at(archive, {settings_.type, settings_.archive}, identity(settings_.share.replicas), epoch,
                         index);
}

size_t EpochOrder::saved_replicas(torch::serialize::InputArchive& archive) const {
  c10::IValue value;
  const bool is_known = settings_.any_replicas && archive.try_read("replicas", value) && value.isInt() &&
                        value.toInt() > 0 && value.toInt() <= std::numeric_limits<int32_t>::max();
  return is_known ? static_cast<size_t>(value.toInt()) : settings_.share.replicas;  // read() says what is wrong
}

// All ranks together have given out the first index * replicas items of the order.
void EpochOrder::load(torch::serialize::InputArchive& archive) {
  const std::scoped_lock lock(mutex_);
  const Share& mine = settings_.share;
  Share theirs = mine;
  theirs.replicas = saved_replicas(archive);
  theirs.rank = 0;
  const auto saved = EpochPosition::read(archive, {settings_.type, settings_.archive}, identity(theirs.replicas),
                                         theirs.longest(items()));
  const size_t given = saved.index * theirs.replicas;
  const bool is_over = saved.index == theirs.longest(items());
  if (!is_over && given % mine.replicas != 0) {
    throw InvalidArgument(
        text(settings_.type, ": position: expected a multiple of ", mine.replicas, " ", settings_.item,
             "s, because as many ranks go on, got ", given, ", which ", theirs.replicas, " ranks have given out"),
        text("Save when all ranks have given out a multiple of ", mine.replicas,
             ", or seek() to the position that you choose"));
  }
  // A rank may have one item less than the one that saved.
  position_.resume(saved.epoch, std::min(is_over ? SIZE_MAX : given / mine.replicas, mine.size(items())));
}

}  // namespace muster::data
