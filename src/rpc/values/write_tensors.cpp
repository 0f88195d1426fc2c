#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/heap.h"
#include "rpc/values/quantized.h"
#include "rpc/values/staging.h"
#include "rpc/values/tensor_row.h"
#include "rpc/values/tensor_table.h"

namespace muster::rpc::detail {
namespace {

template <typename T>
void append(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

std::optional<uint8_t> place_of(const at::Tensor& tensor, Places places) {
  if (places.empty()) return {};
  const auto found = std::find(places.begin(), places.end(), tensor.device());
  return found == places.end() ? std::nullopt : std::optional(static_cast<uint8_t>(found - places.begin()));
}

void check(const at::Tensor& tensor, size_t index, Places places) {
  if (!tensor.defined()) return;
  if (tensor.layout() != at::kStrided)
    throw InvalidArgument(text("a tensor of layout ", tensor.layout(), " cannot be sent"), "Call .to_dense() first");
  if (tensor.dim() > static_cast<int64_t>(kMostDims))
    throw InvalidArgument(text("a tensor of ", tensor.dim(), " dimensions cannot be sent"),
                          text("At most ", kMostDims, " travel: send a view of another shape"));
  if (tensor.is_nested()) throw InvalidArgument("a nested tensor cannot be sent", "Send the list of its parts");
  if (tensor.is_meta() || !tensor.has_storage())
    throw InvalidArgument("a tensor without data cannot be sent: it is on the device meta, or a wrapper of functorch");
  if (tensor.is_quantized() ? !quantized_travels(tensor) : !travels(tensor.scalar_type()))
    throw InvalidArgument(text("a tensor of ", tensor.scalar_type(), " on ", tensor.device(), " cannot be sent"),
                          tensor.is_quantized() ? "Call .dequantize() first" : "Call .to() with another dtype");
  if (!tensor.is_cpu() && !place_of(tensor, places)) throw WithoutPlace(index, tensor.device());
  if (tensor._is_zerotensor()) return;  // it has no memory; a copy is made
  const auto* const impl = tensor.unsafeGetTensorImpl();
  if (impl->numel() != 0 && impl->storage().data() == nullptr)
    throw InvalidArgument("a tensor whose memory was freed cannot be sent", "Its storage was resized to 0");
}

// Whether the tensor's bytes can be sent as they are.
bool ready(const at::Tensor& tensor) {
  return !tensor.is_quantized() && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         (tensor.numel() == 0 || tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense());
}

at::Tensor made_ready(const at::Tensor& tensor) {
  // Below autograd: nothing is recorded, and a tensor that is not a leaf need not be detached first.
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor plain = tensor.is_quantized() ? integers_of(tensor) : tensor;
  if (plain.is_conj()) plain = plain.resolve_conj();
  if (plain.is_neg()) plain = plain.resolve_neg();
  if (plain._is_zerotensor()) plain = plain.clone();
  if (!ready(plain)) plain = plain.contiguous();
  return plain;
}

struct Range {  // bytes of a storage that a tensor covers
  c10::StorageImpl* storage;
  size_t begin, end;
  uint32_t tensor;
};

// Whether the memory is freed with the storage, and is reachable only through the storage.
bool owns_memory(const c10::StorageImpl& storage) {
  const c10::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() == &release_owner)
    return static_cast<const std::shared_ptr<void>*>(data.get_context())->use_count() == 1;
  static const auto from_libtorch = c10::GetDefaultCPUAllocator()->raw_deleter();
  return data.get_context() != nullptr && (data.get_deleter() == from_libtorch || Heap::allocated(data));
}

size_t weak_uses(c10::StorageImpl* storage) {
  auto borrowed = c10::intrusive_ptr<c10::StorageImpl>::reclaim(storage);
  const size_t uses = borrowed.weak_use_count();  // 1: the strong ones together
  borrowed.release();
  return uses;
}

// Whether the handles in `tensors` are the only way to `storage`. `begin` to `end`: all the ranges of it.
bool only_ours(const std::vector<at::Tensor>& tensors, const Range* begin, const Range* end) {
  c10::StorageImpl* const storage = begin->storage;
  c10::SmallVector<const at::Tensor*, 8> handles;
  for (const Range* range = begin; range != end; ++range) handles.push_back(&tensors[range->tensor]);
  std::sort(handles.begin(), handles.end(), [](const at::Tensor* a, const at::Tensor* b) {
    return std::less<const void*>()(a->unsafeGetTensorImpl(), b->unsafeGetTensorImpl());
  });
  size_t distinct = 0;
  for (size_t i = 0; i < handles.size(); ++distinct) {
    const at::Tensor& tensor = *handles[i];
    size_t same = 0;
    while (i < handles.size() && handles[i]->is_same(tensor)) ++i, ++same;
    if (tensor.use_count() != same || tensor.weak_use_count() != 1) return false;
  }
  return c10::raw::intrusive_ptr::use_count(storage) == distinct && weak_uses(storage) == 1 && owns_memory(*storage);
}

std::shared_ptr<void> owner_of(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  c10::raw::intrusive_ptr::incref(storage);
  return std::shared_ptr<void>(storage, [](c10::StorageImpl* gone) { c10::raw::intrusive_ptr::decref(gone); });
}

struct Place {
  uint32_t piece = 0;
  uint64_t offset = 0;
};

bool row_by_row(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (strides[i] != expected) return false;
    expected *= std::max<int64_t>(sizes[i], 1);
  }
  return true;
}

void write_row(const at::Tensor& tensor, bool requires_grad, bool quantized, std::optional<uint8_t> device,
               const Place& place, std::string& body) {
  if (!tensor.defined()) return append<uint8_t>(body, 0);
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const bool strided = !row_by_row(sizes, strides);
  char row[3 + 2 * 8 * kMostDims + 1 + 12];
  char* to = row;
  const auto put = [&to](auto number) {
    std::memcpy(to, &number, sizeof number);
    to += sizeof number;
  };
  put(static_cast<uint8_t>(kDefined | (requires_grad ? kRequiresGrad : 0) | (strided ? kStrided : 0) |
                           (device ? kPlaced : 0) | (quantized ? kQuantized : 0)));
  put(static_cast<uint8_t>(tensor.scalar_type()));
  put(static_cast<uint8_t>(sizes.size()));
  for (const int64_t size : sizes) put(size);
  if (strided)
    for (const int64_t stride : strides) put(stride);
  if (device) put(*device);
  if (tensor.numel() != 0) {
    put(place.piece);
    put(place.offset);
  }
  body.append(row, static_cast<size_t>(to - row));
}

// By the tensors' indices.
using Quantizers = std::unordered_map<size_t, at::QuantizerPtr>;

// Replaces each tensor whose bytes cannot be sent by a copy, and a quantized one by its integers. `requires_grad`,
// `quantizers`: of the originals.
void make_all_ready(std::vector<at::Tensor>& tensors, c10::SmallVectorImpl<uint8_t>& requires_grad,
                    Quantizers& quantizers) {
  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies;  // a tensor that is in the list twice has one copy
  std::vector<at::Tensor> originals;                              // keeps the keys of `copies` alive
  for (at::Tensor& tensor : tensors) {
    requires_grad.push_back(tensor.defined() && tensor.requires_grad());
    if (!tensor.defined() || ready(tensor)) continue;
    if (tensor.is_quantized()) quantizers.emplace(&tensor - tensors.data(), quantizer_of(tensor));
    const auto [copy, fresh] = copies.try_emplace(tensor.unsafeGetTensorImpl());
    if (fresh) copy->second = made_ready(tensor);
    originals.push_back(std::exchange(tensor, copy->second));
  }
}

// The ranges of all tensors that have elements, by storage and begin.
void find_ranges(const std::vector<at::Tensor>& tensors, c10::SmallVectorImpl<Range>& ranges) {
  for (uint32_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const size_t begin = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
    ranges.push_back({tensor.storage().unsafeGetStorageImpl(), begin, begin + tensor.nbytes(), i});
    if (ranges.back().end > ranges.back().storage->nbytes())
      throw InvalidArgument("a tensor that is larger than its storage cannot be sent",
                            "Its storage was resized beneath it");
  }
  if (ranges.size() > 1)
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) {
      if (a.storage != b.storage) return std::less<const void*>()(a.storage, b.storage);
      return a.begin != b.begin ? a.begin < b.begin : a.tensor < b.tensor;
    });
}

// Appends the pieces of one storage, whose ranges are `first` to `end`, and says in `where` where each tensor is.
void append_pieces(const std::vector<at::Tensor>& tensors, const Range* first, const Range* end,
                   std::vector<transport::Piece>& pieces, c10::SmallVectorImpl<Place>& where) {
  const size_t before = pieces.size();
  const bool is_here = first->storage->device().is_cpu();
  auto* const data = is_here ? static_cast<std::byte*>(const_cast<void*>(first->storage->data())) : nullptr;
  for (const Range* from = first; from != end;) {
    // Find all ranges that overlap or touch.
    size_t last = from->end, widest = 1;
    const Range* to = from;
    for (; to != end && to->begin <= last; ++to) {
      last = std::max(last, to->end);
      widest = std::max(widest, tensors[to->tensor].itemsize());
    }
    // If tensors of several dtypes overlap, each must still be aligned at the receiver.
    const size_t begin = from->begin / widest * widest;
    for (const Range* each = from; each != to; ++each)
      where[each->tensor] = {static_cast<uint32_t>(pieces.size()), each->begin - begin};
    if (is_here) {
      pieces.push_back({data + begin, last - begin, nullptr, false});
    } else {
      const at::Tensor copy = to_host(tensors[from->tensor].storage(), begin, last - begin);
      pieces.push_back({static_cast<std::byte*>(copy.mutable_data_ptr()), last - begin, owner_of(copy), true});
    }
    from = to;
  }
  if (!is_here) return;
  // Two pieces of one storage cannot both take its memory away.
  if (pieces.size() == before + 1) pieces.back().unique = only_ours(tensors, first, end);
  pieces[before].owner = owner_of(tensors[first->tensor]);
  for (size_t i = before + 1; i < pieces.size(); ++i) pieces[i].owner = pieces[before].owner;
}

}  // namespace

WithoutPlace::WithoutPlace(size_t tensor, c10::Device device)
    : InvalidArgument(text("a tensor on ", device, " cannot be sent: the device is not mapped"),
                      "Map it in rpc::Options::device_maps, or send .cpu()"),
      tensor(tensor) {}

void write_tensors(std::vector<at::Tensor>& tensors, std::string& body, std::vector<transport::Piece>& pieces,
                   Places places) {
  for (size_t i = 0; i < tensors.size(); ++i) check(tensors[i], i, places);
  c10::SmallVector<uint8_t, 16> requires_grad;
  Quantizers quantizers;
  make_all_ready(tensors, requires_grad, quantizers);

  c10::SmallVector<Range, 4> ranges;
  find_ranges(tensors, ranges);
  c10::SmallVector<Place, 4> where(tensors.size());
  for (const Range *first = ranges.begin(), *const end = ranges.end(); first != end;) {
    const Range* const next = std::find_if(first, end, [&](const Range& r) { return r.storage != first->storage; });
    append_pieces(tensors, first, next, pieces, where);
    first = next;
  }

  append(body, static_cast<uint32_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto device = tensors[i].defined() ? place_of(tensors[i], places) : std::nullopt;
    const auto quantizer = quantizers.find(i);
    write_row(tensors[i], requires_grad[i] != 0, quantizer != quantizers.end(), device, where[i], body);
    if (quantizer != quantizers.end()) write_quantizer(*quantizer->second, body);
  }
  tensors.clear();
}

}  // namespace muster::rpc::detail
