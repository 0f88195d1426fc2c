#include "rpc/tensor_table.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/heap.h"
#include "rpc/staging.h"

namespace muster::rpc::detail {
namespace {

constexpr uint8_t kDefined = 1, kRequiresGrad = 2, kStrided = 4, kPlaced = 8;
constexpr uint8_t kKnownFlags = kDefined | kRequiresGrad | kStrided | kPlaced;
constexpr size_t kMostDims = 64;  // libtorch's own limit
constexpr int64_t kLargestStride = int64_t{1}
                                   << 62;  // for a dimension of fewer than two elements, whose stride has no meaning

// True for dtypes whose elements are bytes with a meaning of their own: not quantized ones, nor parts of bytes.
bool travels(at::ScalarType dtype) {
  switch (dtype) {
    case at::kByte:
    case at::kChar:
    case at::kShort:
    case at::kInt:
    case at::kLong:
    case at::kUInt16:
    case at::kUInt32:
    case at::kUInt64:
    case at::kHalf:
    case at::kBFloat16:
    case at::kFloat:
    case at::kDouble:
    case at::kComplexHalf:
    case at::kComplexFloat:
    case at::kComplexDouble:
    case at::kBool:
    case at::kFloat8_e5m2:
    case at::kFloat8_e4m3fn:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e8m0fnu:
      return true;
    default:
      return false;
  }
}

bool may_require_grad(at::ScalarType dtype) { return at::isFloatingType(dtype) || at::isComplexType(dtype); }

template <typename T>
void append(std::string& to, T number) {
  to.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// --- writing ---

std::optional<uint8_t> place_of(const at::Tensor& tensor, Places places) {
  if (places.empty()) return {};
  const auto found = std::find(places.begin(), places.end(), tensor.device());
  return found == places.end() ? std::nullopt : std::optional(static_cast<uint8_t>(found - places.begin()));
}

void check(const at::Tensor& tensor, size_t index, Places places) {
  if (!tensor.defined()) return;
  if (tensor.is_quantized()) throw InvalidArgument("a quantized tensor cannot be sent", "Call .dequantize() first");
  if (tensor.layout() != at::kStrided)
    throw InvalidArgument(text("a tensor of layout ", tensor.layout(), " cannot be sent"), "Call .to_dense() first");
  if (tensor.is_nested()) throw InvalidArgument("a nested tensor cannot be sent", "Send the list of its parts");
  if (tensor.is_meta() || !tensor.has_storage())
    throw InvalidArgument("a tensor without data cannot be sent: it is on the device meta, or a wrapper of functorch");
  if (!travels(tensor.scalar_type()))
    throw InvalidArgument(text("a tensor of ", tensor.scalar_type(), " cannot be sent"),
                          "Call .to() with another dtype");
  if (!tensor.is_cpu() && !place_of(tensor, places)) throw WithoutPlace(index, tensor.device());
  if (tensor._is_zerotensor()) return;  // it has no memory; a copy is made
  const auto* const impl = tensor.unsafeGetTensorImpl();
  if (impl->numel() != 0 && impl->storage().data() == nullptr)
    throw InvalidArgument("a tensor whose memory was freed cannot be sent", "Its storage was resized to 0");
}

// Whether the tensor's bytes can be sent as they are.
bool ready(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         (tensor.numel() == 0 || tensor.unsafeGetTensorImpl()->is_non_overlapping_and_dense());
}

at::Tensor made_ready(const at::Tensor& tensor) {
  // Below autograd: nothing is recorded, and a tensor that is not a leaf need not be detached first.
  const at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor plain = tensor;
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

void release_owner(void* context) { delete static_cast<std::shared_ptr<void>*>(context); }

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

void write_row(const at::Tensor& tensor, bool requires_grad, std::optional<uint8_t> device, const Place& place,
               std::string& body) {
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
                           (device ? kPlaced : 0)));
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

}  // namespace

WithoutPlace::WithoutPlace(size_t tensor, c10::Device device)
    : InvalidArgument(text("a tensor on ", device, " cannot be sent: the device is not mapped"),
                      "Map it in rpc::Options::device_maps, or send .cpu()"),
      tensor(tensor) {}

void write_tensors(std::vector<at::Tensor>& tensors, std::string& body, std::vector<transport::Piece>& pieces,
                   Places places) {
  for (size_t i = 0; i < tensors.size(); ++i) check(tensors[i], i, places);

  c10::SmallVector<uint8_t, 16> requires_grad;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> copies;  // a tensor that is in the list twice has one copy
  std::vector<at::Tensor> originals;                              // keeps the keys of `copies` alive
  for (at::Tensor& tensor : tensors) {
    requires_grad.push_back(tensor.defined() && tensor.requires_grad());
    if (!tensor.defined() || ready(tensor)) continue;
    const auto [copy, fresh] = copies.try_emplace(tensor.unsafeGetTensorImpl());
    if (fresh) copy->second = made_ready(tensor);
    originals.push_back(std::exchange(tensor, copy->second));
  }
  copies.clear();
  originals.clear();

  c10::SmallVector<Range, 4> ranges;
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

  c10::SmallVector<Place, 4> where(tensors.size());
  for (const Range *of = ranges.begin(), *const end = ranges.end(); of != end;) {
    const Range* const first = of;
    const Range* const storage_end = std::find_if(of, end, [&](const Range& r) { return r.storage != of->storage; });
    const size_t before = pieces.size();
    const bool is_here = of->storage->device().is_cpu();
    auto* const data = is_here ? static_cast<std::byte*>(const_cast<void*>(of->storage->data())) : nullptr;
    for (const Range* from = of; from != storage_end;) {
      // Find all ranges that overlap or touch.
      size_t last = from->end, widest = 1;
      const Range* to = from;
      for (; to != storage_end && to->begin <= last; ++to) {
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
    of = storage_end;
    if (!is_here) continue;
    // Two pieces of one storage cannot both take its memory away.
    if (pieces.size() == before + 1) pieces.back().unique = only_ours(tensors, first, storage_end);
    pieces[before].owner = owner_of(tensors[first->tensor]);
    for (size_t i = before + 1; i < pieces.size(); ++i) pieces[i].owner = pieces[before].owner;
  }

  append(body, static_cast<uint32_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto device = tensors[i].defined() ? place_of(tensors[i], places) : std::nullopt;
    write_row(tensors[i], requires_grad[i] != 0, device, where[i], body);
  }
  tensors.clear();
}

// --- reading ---

namespace {

[[noreturn]] void corrupt_tensor(std::string_view what) { throw CorruptError(text("a tensor of a message: ", what)); }

using Numbers = c10::SmallVector<int64_t, 6>;

// The pieces as storages, in place or copied. There is one storage per piece, made at its first use.
class Storages {
 public:
  explicit Storages(std::vector<transport::Piece>& pieces) : pieces_(pieces), made_(pieces.size()) {}

  const c10::Storage& of(uint32_t index) {
    c10::Storage& storage = made_[index];
    if (!storage) storage = make(pieces_[index]);
    return storage;
  }

  // The same on another device; `place` is the place of that device.
  const c10::Storage& on(c10::Device device, uint8_t place, uint32_t index) {
    if (!elsewhere_) elsewhere_ = std::make_unique<Elsewhere>();
    c10::Storage& storage = (*elsewhere_)[{index, place}];
    if (!storage) storage = to_device(pieces_[index].data, pieces_[index].bytes, device);
    return storage;
  }

 private:
  using Elsewhere = std::map<std::pair<uint32_t, uint8_t>, c10::Storage>;  // by piece and place

  static c10::Storage make(transport::Piece& piece) {
    c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
    c10::DataPtr data;
    if (piece.owner) {
      auto owner = std::make_unique<std::shared_ptr<void>>(std::move(piece.owner));
      data = {piece.data, owner.get(), &release_owner, c10::Device(c10::DeviceType::CPU)};
      owner.release();
    } else {
      data = allocator->allocate(piece.bytes);
      copy_bytes(data.get(), piece.data, piece.bytes);
    }
    return c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), piece.bytes, std::move(data),
                                                 allocator, /*resizable=*/true);
  }

  std::vector<transport::Piece>& pieces_;
  c10::SmallVector<c10::Storage, 4> made_;
  std::unique_ptr<Elsewhere> elsewhere_;  // seldom needed
};

// Throws unless the strides reach each element of the range once, in any order of the dimensions.
void check_dense(const Numbers& sizes, const Numbers& strides) {
  c10::SmallVector<std::pair<int64_t, int64_t>, 6> order;  // stride and size
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (strides[i] < 0 || strides[i] > kLargestStride) corrupt_tensor("a stride out of range");
    if (sizes[i] != 1) order.emplace_back(strides[i], sizes[i]);
  }
  std::sort(order.begin(), order.end());
  int64_t expected = 1;
  for (const auto& [stride, size] : order) {
    if (stride != expected) corrupt_tensor("its strides overlap, or leave gaps");
    expected *= size;
  }
}

at::Tensor asking(at::Tensor tensor, uint8_t flags) {
  if (flags & kRequiresGrad) tensor.set_requires_grad(true);
  return tensor;
}

at::Tensor read_row(WireReader& body, const std::vector<transport::Piece>& pieces, Storages& storages, Places places) {
  const auto flags = body.get<uint8_t>();
  if (flags & ~kKnownFlags) corrupt_tensor("unknown flags");
  if (!(flags & kDefined)) {
    if (flags) corrupt_tensor("an undefined one with properties");
    return {};
  }
  const auto dtype = static_cast<at::ScalarType>(body.get<uint8_t>());
  if (!travels(dtype)) corrupt_tensor("an unknown dtype");
  if ((flags & kRequiresGrad) && !may_require_grad(dtype)) corrupt_tensor("a dtype that has no gradient");
  const auto dims = body.get<uint8_t>();
  if (dims > kMostDims) corrupt_tensor("too many dimensions");
  Numbers sizes(dims), strides;
  int64_t room = 1;  // elements, if none of the sizes were 0
  bool empty = false;
  for (int64_t& size : sizes) {
    size = body.get<int64_t>();
    if (size < 0 || __builtin_mul_overflow(room, std::max<int64_t>(size, 1), &room))
      corrupt_tensor("a size out of range");
    empty |= size == 0;
  }
  const auto item = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t bytes;
  if (__builtin_mul_overflow(room, item, &bytes)) corrupt_tensor("a size out of range");
  if (flags & kStrided) {
    strides.resize(dims);
    for (int64_t& stride : strides) stride = body.get<int64_t>();
    if (!empty) {
      check_dense(sizes, strides);
    } else if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s < 0 || s > kLargestStride; })) {
      corrupt_tensor("a stride out of range");
    }
  }

  uint8_t place = 0;
  c10::Device device(c10::kCPU);
  if (flags & kPlaced) {
    place = body.get<uint8_t>();
    if (place >= places.size()) corrupt_tensor("a device that this worker does not give");
    device = places[place];
  }

  c10::Storage storage;
  int64_t offset = 0;
  if (empty) {
    if (!device.is_cpu()) return asking(on_device({}, dtype, sizes, strides, 0, device), flags);
    c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
    storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, allocator, true);
  } else {
    const auto index = body.get<uint32_t>();
    const auto at = body.get<uint64_t>();
    if (index >= pieces.size()) corrupt_tensor("bytes that did not come");
    const transport::Piece& piece = pieces[index];
    if (at > piece.bytes || static_cast<uint64_t>(bytes) > piece.bytes - at) corrupt_tensor("it ends after its bytes");
    if (at % static_cast<uint64_t>(item) != 0) corrupt_tensor("it begins within an element");
    offset = static_cast<int64_t>(at) / item;
    if (!device.is_cpu())
      return asking(on_device(storages.on(device, place, index), dtype, sizes, strides, offset, device), flags);
    if (reinterpret_cast<uintptr_t>(piece.data) % static_cast<uintptr_t>(std::min<int64_t>(item, 8)) != 0) {
      // Unaligned: the processor could read it, but C++ does not allow it.
      c10::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(static_cast<size_t>(bytes));
      copy_bytes(data.get(), piece.data + at, static_cast<size_t>(bytes));
      storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(data),
                                                      c10::GetDefaultCPUAllocator(), true);
      offset = 0;
    } else {
      storage = storages.of(index);
    }
  }
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (flags & kStrided) {
    impl->set_sizes_and_strides(sizes, strides, offset);
  } else {
    impl->set_sizes_contiguous(sizes);
    impl->set_storage_offset(offset);
  }
  return asking(std::move(tensor), flags);
}

}  // namespace

std::vector<at::Tensor> read_tensors(WireReader& body, std::vector<transport::Piece>& pieces, Places places) {
  const auto count = body.get<uint32_t>();
  std::vector<at::Tensor> tensors;
  if (count == 0) return tensors;
  tensors.reserve(std::min<size_t>(count, 64));  // not more: `count` may be wrong
  Storages storages(pieces);
  for (uint32_t i = 0; i < count; ++i) tensors.push_back(read_row(body, pieces, storages, places));
  return tensors;
}

}  // namespace muster::rpc::detail
