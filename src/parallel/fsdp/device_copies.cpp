#include "parallel/fsdp/device_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <iterator>
#include <mutex>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/fsdp/use_order.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/tape/watched.h"

namespace muster::fsdp {

class DeviceCopies::Units {
 public:
  explicit Units(Setup setup)
      : setup_(std::move(setup)),
        guard_(setup_.device.type()),
        stream_(guard_.getStreamFromGlobalPool(setup_.device)),
        host_has_all_(std::none_of(setup_.from.begin(), setup_.from.end(), [](const parallel::NamedTensor& from) {
          return parallel::is_spread(from.tensor);
        })) {}

  void set_copies(const std::vector<at::Tensor>& copies) { copies_ = copies; }
  void use(size_t unit, uint64_t operation);
  void forget();
  std::vector<size_t> here() const;

 private:
  // A stream that may read a unit, and what it had been asked to by the time of the last operator that reads it.
  struct Reader {
    c10::Stream stream;
    c10::Event asked;
  };
  struct Here {
    size_t unit = 0;
    std::vector<at::Tensor> memory;  // by parameter of the unit
    c10::Event arrived;
    std::vector<Reader> readers;
    bool is_read = false;    // since `asked`
    uint64_t operation = 0;  // the last that reads it
  };
  using List = std::vector<Here>;

  Here start(size_t unit);
  static void note_reads(Here& here);
  void free(List::iterator here);
  void prefetch(uint64_t operation);

  const Setup setup_;
  const c10::impl::VirtualGuardImpl guard_;
  const c10::Stream stream_;  // of the copies from the host
  const bool host_has_all_;
  std::vector<at::Tensor> copies_;  // by parameter
  mutable std::mutex mutex_;        // for the following ones
  List here_;                       // the last used one first
  UseOrder order_;
  uint64_t starts_ = 0;
};

DeviceCopies::Units::Here DeviceCopies::Units::start(size_t unit) {
  const c10::InferenceMode normal(false);
  const at::NoGradGuard no_grad;
  const parallel::UnwatchedGuard unwatched;
  const c10::StreamGuard on_stream(stream_);
  Here here{.unit = unit, .memory = {}, .arrived = c10::Event(setup_.device.type()), .readers = {}};
  const uint64_t operation = ~starts_++;  // no operator has this number
  for (const size_t index : setup_.units[unit]) {
    const at::Tensor &copy = copies_[index], &from = setup_.from[index].tensor;
    here.memory.push_back(at::empty_strided(copy.sizes(), copy.strides(), copy.options()));
    parallel::call_before_use(from, operation, /*writes=*/false);
    here.memory.back().copy_(from, /*non_blocking=*/host_has_all_);  // else values may go when this call returns
  }
  for (size_t i = 0; i < here.memory.size(); ++i) parallel::give_memory(copies_[setup_.units[unit][i]], here.memory[i]);
  here.arrived.record(stream_);
  return here;
}

void DeviceCopies::Units::note_reads(Here& here) {
  if (!std::exchange(here.is_read, false)) return;
  for (Reader& reader : here.readers) reader.asked.record(reader.stream);
}

void DeviceCopies::Units::free(List::iterator here) {
  note_reads(*here);
  here->arrived.synchronize();  // also the host's memory is not read any more
  for (const Reader& reader : here->readers) reader.asked.synchronize();
  for (const size_t index : setup_.units[here->unit]) parallel::give_memory(copies_[index], {});
  here_.erase(here);
}

// What the host has to gather first is not fetched ahead: that is collective, and ranks need not expect the same. The
// gatherer fetches ahead.
void DeviceCopies::Units::prefetch(uint64_t operation) {
  const auto come = [&](size_t unit) {
    try {
      here_.push_back(start(unit));
      return true;
    } catch (const c10::OutOfMemoryError&) {
      return false;  // the operator does not need it
    }
  };
  fetch_ahead(here_, order_.expected(host_has_all_ ? setup_.most : 1), setup_.most, operation, come,
              [&](List::iterator goes) { free(goes); });
}

void DeviceCopies::Units::use(size_t unit, uint64_t operation) {
  const std::lock_guard lock(mutex_);
  // What operators before this one read has been asked for.
  for (Here& here : here_)
    if (here.unit != unit && here.operation != operation) note_reads(here);
  const auto at = find_unit(here_, unit);
  const bool is_next = at != here_.begin() || at == here_.end();
  if (at != here_.end()) {
    std::rotate(here_.begin(), at, std::next(at));
  } else {
    make_room(here_, setup_.most - 1, operation, [&](List::iterator goes) { free(goes); });  // it may need more
    here_.insert(here_.begin(), start(unit));
  }
  Here& now = here_.front();
  const c10::Stream current = guard_.getStream(setup_.device);
  const auto is_current = [&](const Reader& reader) { return reader.stream == current; };
  if (std::none_of(now.readers.begin(), now.readers.end(), is_current)) {
    now.arrived.block(current);
    now.readers.push_back({.stream = current, .asked = c10::Event(setup_.device.type())});
  }
  now.operation = operation;
  now.is_read = true;
  if (!is_next) return;
  order_.used(unit);
  prefetch(operation);
}

void DeviceCopies::Units::forget() {
  const std::lock_guard lock(mutex_);
  while (!here_.empty()) free(std::prev(here_.end()));
  order_.restart();
}

std::vector<size_t> DeviceCopies::Units::here() const {
  const std::lock_guard lock(mutex_);
  return sorted_units(here_);
}

// The thread runs one node after the other; so when it has run this one, it has left the one before.
void wait_for_autograd(const at::Device& device) {
  const c10::InferenceMode normal(false);
  const at::AutoGradMode with_grad(true);
  const at::Tensor x = at::empty({1}, at::TensorOptions(device)).requires_grad_();
  torch::autograd::grad({x.view({1})}, {x}, {at::empty_like(x)});
}

DeviceCopies::DeviceCopies(Setup setup) {
  std::vector<size_t> unit_of(setup.from.size());
  for (size_t u = 0; u < setup.units.size(); ++u)
    for (const size_t i : setup.units[u]) unit_of[i] = u;
  const std::vector<parallel::NamedTensor> from = setup.from;
  const at::Device device = setup.device;
  units_ = std::make_shared<Units>(std::move(setup));
  for (size_t i = 0; i < from.size(); ++i) {
    const auto& [name, tensor] = from[i];
    const auto before_use = [units = std::weak_ptr(units_), unit = unit_of[i], name](uint64_t operation, bool) {
      const auto here = units.lock();
      if (!here)
        throw InvalidArgument(text("the copy of parameter ", name, " on a device is gone"),
                              "Keep the FullyShardedDataParallel until backward() is over");
      here->use(unit, operation);
    };
    copies_.push_back(
        parallel::tensor_without_memory(tensor, device, {.name = name, .before_use = before_use, .is_copy = true}));
  }
  units_->set_copies(copies_);
}

DeviceCopies::~DeviceCopies() {
  try {
    forget();
  } catch (const std::exception&) {  // the device has failed: there is nothing to wait for
  }
}

void DeviceCopies::forget() { units_->forget(); }
std::vector<size_t> DeviceCopies::units_here() const { return units_->here(); }

}  // namespace muster::fsdp
