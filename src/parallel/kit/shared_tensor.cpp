#include "parallel/kit/shared_tensor.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/kit/buckets.h"

namespace muster::parallel {
namespace {

// What a storage refers to.
struct Place {
  std::shared_ptr<shm::Mapping> shared;  // or null
  c10::Storage own;                      // else
  Sharing sharing;
};
void release(void* context) { const std::unique_ptr<Place> place(static_cast<Place*>(context)); }

const Place* place_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? static_cast<const Place*>(data.get_context()) : nullptr;
}

c10::DataPtr pointer_to(void* data, Place place, const c10::Device& device = c10::DeviceType::CPU) {
  return {data, new Place(std::move(place)), &release, device};
}

}  // namespace

at::Tensor shared_tensor(const std::shared_ptr<shm::Mapping>& memory, size_t offset, const at::Tensor& like,
                         Sharing sharing) {
  return tensor_at(pointer_to(memory->data() + offset, {.shared = memory, .own = {}, .sharing = std::move(sharing)}),
                   like);
}

at::Tensor private_tensor(const at::Tensor& tensor, Sharing sharing) {
  const Place* const before = place_of(tensor);
  const c10::Storage own = before && before->own ? before->own : tensor.storage();
  const c10::Storage storage(
      c10::Storage::use_byte_size_t(), own.nbytes(),
      pointer_to(own.mutable_data(), {.shared = nullptr, .own = own, .sharing = std::move(sharing)}), nullptr,
      /*resizable=*/false);
  return at::empty({0}, tensor.options().requires_grad(false))
      .set_(storage, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

at::Tensor tensor_without_memory(const at::Tensor& like, const at::Device& device, Sharing sharing) {
  return tensor_at(pointer_to(nullptr, {.shared = nullptr, .own = {}, .sharing = std::move(sharing)}, device), like);
}

void give_memory(const at::Tensor& tensor, const at::Tensor& memory) {
  const c10::Storage& storage = tensor.storage();
  const c10::Device device = storage.device();
  c10::DataPtr before = storage.set_data_ptr({nullptr, device});
  auto* const place = static_cast<Place*>(before.release_context());  // the same, which operators may be asking now
  place->own = memory.defined() ? memory.storage() : c10::Storage();
  storage.set_data_ptr_noswap({place->own ? place->own.mutable_data() : nullptr, place, &release, device});
}

const Sharing* sharing_of(const at::Tensor& tensor) {
  const Place* const place = place_of(tensor);
  return place && place->shared ? &place->sharing : nullptr;
}
bool may_be_watched(const at::Tensor& tensor) { return place_of(tensor) != nullptr; }
bool belongs_to_another_rank(const at::Tensor& tensor) {
  const Sharing* const sharing = sharing_of(tensor);
  return sharing && !sharing->is_own;
}
bool is_spread(const at::Tensor& tensor) {
  const Sharing* const sharing = sharing_of(tensor);
  return sharing && sharing->before_use;
}
bool is_here(const at::Tensor& tensor) {
  const Sharing* const sharing = sharing_of(tensor);
  return !sharing || sharing->is_here();
}
void call_before_use(const at::Tensor& tensor, uint64_t operation, bool writes) {
  const Place* const place = place_of(tensor);
  if (!place) return;
  const Sharing& sharing = place->sharing;
  if (sharing.is_copy && writes)
    throw InvalidArgument(
        text("an operator would change the copy of parameter ", sharing.name, ", which other operators use"),
        "Let it change a clone(); a parameter that is converted to the dtype of its copy is that copy itself");
  if (sharing.before_use) sharing.before_use(operation, writes);
}
at::Tensor call_instead(const at::Tensor& tensor) {
  const Place* const place = place_of(tensor);
  return place && place->sharing.instead ? place->sharing.instead(tensor) : at::Tensor();
}

}  // namespace muster::parallel
