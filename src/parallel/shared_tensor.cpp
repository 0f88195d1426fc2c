#include "parallel/shared_tensor.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/buckets.h"

namespace muster::parallel {
namespace {

// What a storage in shared memory refers to.
struct Place {
  std::shared_ptr<shm::Mapping> memory;
  Sharing sharing;
};
void release(void* context) { const std::unique_ptr<Place> place(static_cast<Place*>(context)); }

}  // namespace

at::Tensor shared_tensor(const std::shared_ptr<shm::Mapping>& memory, size_t offset, const at::Tensor& like,
                         Sharing sharing) {
  auto place = std::make_unique<Place>(Place{memory, std::move(sharing)});
  c10::DataPtr data(memory->data() + offset, place.release(), &release, c10::Device(c10::DeviceType::CPU));
  const c10::Storage storage(c10::Storage::use_byte_size_t(), like.nbytes(), std::move(data), nullptr,
                             /*resizable=*/false);
  return at::empty({0}, like.options().device(at::kCPU).requires_grad(false))
      .set_(storage, 0, like.sizes(), dense_strides(like));
}

const Sharing* sharing_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  const c10::DataPtr& data = tensor.storage().data_ptr();
  return data.get_deleter() == &release ? &static_cast<const Place*>(data.get_context())->sharing : nullptr;
}
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
  const Sharing* const sharing = sharing_of(tensor);
  if (!sharing) return;
  if (sharing->is_copy && writes)
    throw InvalidArgument(
        text("an operator would change the copy of parameter ", sharing->name, ", which all ranks of the host use"),
        "Let it change a clone(); a parameter that is converted to the dtype of its copy is that copy itself");
  if (sharing->before_use) sharing->before_use(operation, writes);
}
at::Tensor call_instead(const at::Tensor& tensor) {
  const Sharing* const sharing = sharing_of(tensor);
  return sharing && sharing->instead ? sharing->instead(tensor) : at::Tensor();
}

}  // namespace muster::parallel
