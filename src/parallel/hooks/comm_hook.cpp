#include "muster/parallel/comm_hook.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {

void HookFuture::run_next_step() {
  for (Work& work : works_) work.wait();
  works_.clear();
  const Step step = std::move(steps_.front());
  steps_.pop_front();
  HookFuture made = step.run(std::exchange(value_, at::Tensor()));
  works_ = std::move(made.works_);
  value_ = std::move(made.value_);
  steps_.insert(steps_.begin(), std::make_move_iterator(made.steps_.begin()),
                std::make_move_iterator(made.steps_.end()));
}

void HookFuture::go_on() {
  const auto next = std::find_if(steps_.begin(), steps_.end(), [](const Step& step) { return step.communicates; });
  if (next != steps_.end())
    for (auto n = next - steps_.begin(); n >= 0; --n) run_next_step();
  const auto is_completed = [](const Work& work) { return work.is_completed(); };
  while (!steps_.empty() && !steps_.front().communicates && std::all_of(works_.begin(), works_.end(), is_completed))
    run_next_step();
}

at::Tensor HookFuture::get() {
  while (!steps_.empty()) run_next_step();
  for (Work& work : works_) work.wait();
  works_.clear();
  return value_;
}

GradBucket::GradBucket(size_t index, size_t count, at::Tensor buffer, std::vector<Place> places, Group group,
                       std::shared_ptr<Heap> heap, double scale)
    : index_(index),
      count_(count),
      buffer_(std::move(buffer)),
      places_(std::move(places)),
      group_(std::move(group)),
      averages_among_(group_),
      heap_(std::move(heap)),
      scale_(scale) {}

void GradBucket::set_buffer(at::Tensor buffer) {
  if (!buffer.defined() || buffer.dim() != 1 || buffer.numel() != buffer_.numel() || !buffer.is_contiguous())
    throw InvalidArgument(
        text("set_buffer() gets a tensor that is not as the bucket's buffer of ", buffer_.numel(), " elements"),
        "Give a contiguous tensor of one dimension with as many elements");
  buffer_ = std::move(buffer);
}

at::Tensor GradBucket::Place::in(const at::Tensor& elements) const {
  return elements.as_strided(parameter.sizes(), strides, elements.storage_offset() + offset);
}

std::vector<at::Tensor> GradBucket::gradients() const {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> all;
  for (const Place& place : places_) all.push_back(place.in(buffer_));
  return all;
}

at::Tensor GradBucket::empty(int64_t elements, at::ScalarType dtype) const {
  if (heap_ && buffer_.device().is_cpu()) return heap_->empty({elements}, dtype);
  return at::empty({elements}, buffer_.options().dtype(dtype));
}

}  // namespace muster
