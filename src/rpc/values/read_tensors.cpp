#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/copy.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "rpc/values/quantized.h"
#include "rpc/values/staging.h"
#include "rpc/values/tensor_row.h"
#include "rpc/values/tensor_table.h"

namespace muster::rpc::detail {
namespace {

// Of a dimension of fewer than two elements, whose stride has no meaning.
constexpr int64_t kLargestStride = int64_t{1} << 62;

bool may_require_grad(at::ScalarType dtype) { return at::isFloatingType(dtype) || at::isComplexType(dtype); }

[[noreturn]] void corrupt_tensor(std::string_view what) { throw CorruptError(text("a tensor of a message: ", what)); }

using Numbers = c10::SmallVector<int64_t, 6>;

// The pieces as storages, in place or copied. There is one storage per piece, made at its first use.
class Storages {
 public:
  explicit Storages(std::vector<transport::Piece>& pieces)
      : pieces_(pieces), made_(pieces.size()), counters_(pieces.size()) {}

  const c10::Storage& of(uint32_t index) {
    c10::Storage& storage = made_[index];
    if (!storage) storage = make(pieces_[index]);
    return storage;
  }

  // A tensor of this piece: those of one piece share a version counter, as views do, so that libtorch notices if a
  // tensor that a backward needs is changed through another one.
  at::Tensor with_counter(at::Tensor tensor, uint32_t index) {
    if (auto& counter = counters_[index]; counter)
      tensor.unsafeGetTensorImpl()->set_version_counter(*counter);
    else
      counter = tensor.unsafeGetTensorImpl()->version_counter();
    return tensor;
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
  c10::SmallVector<std::optional<c10::VariableVersion>, 4> counters_;
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

// What a row says of a tensor.
struct Row {
  uint8_t flags = 0;
  at::ScalarType dtype = at::kFloat;
  Numbers sizes, strides;
  bool empty = false;
  int64_t item = 0, bytes = 0;  // of an element; of all of them, if none of the sizes were 0
  uint8_t place = 0;
  c10::Device device{c10::kCPU};
};

void read_sizes(WireReader& body, Row& row) {
  const auto dims = body.get<uint8_t>();
  if (dims > kMostDims) corrupt_tensor("too many dimensions");
  row.sizes.resize(dims);
  int64_t room = 1;  // elements, if none of the sizes were 0
  for (int64_t& size : row.sizes) {
    size = body.get<int64_t>();
    if (size < 0 || __builtin_mul_overflow(room, std::max<int64_t>(size, 1), &room))
      corrupt_tensor("a size out of range");
    row.empty |= size == 0;
  }
  row.item = static_cast<int64_t>(c10::elementSize(row.dtype));
  if (__builtin_mul_overflow(room, row.item, &row.bytes)) corrupt_tensor("a size out of range");
}

void read_strides(WireReader& body, Row& row) {
  row.strides.resize(row.sizes.size());
  for (int64_t& stride : row.strides) stride = body.get<int64_t>();
  if (!row.empty) {
    check_dense(row.sizes, row.strides);
  } else if (std::any_of(row.strides.begin(), row.strides.end(),
                         [](int64_t s) { return s < 0 || s > kLargestStride; })) {
    corrupt_tensor("a stride out of range");
  }
}

// All but the flags, up to the place of the elements.
void read_description(WireReader& body, Places places, Row& row) {
  row.dtype = static_cast<at::ScalarType>(body.get<uint8_t>());
  if (!travels(row.dtype)) corrupt_tensor("an unknown dtype");
  if ((row.flags & kRequiresGrad) && !may_require_grad(row.dtype)) corrupt_tensor("a dtype that has no gradient");
  read_sizes(body, row);
  if (row.flags & kStrided) read_strides(body, row);
  if (row.flags & kPlaced) {
    row.place = body.get<uint8_t>();
    if (row.place >= places.size()) corrupt_tensor("a device that this worker does not give");
    row.device = places[row.place];
  }
}

at::Tensor with_grad_flag(at::Tensor tensor, uint8_t flags) {
  if (flags & kRequiresGrad) tensor.set_requires_grad(true);
  return tensor;
}

at::Tensor cpu_tensor(c10::Storage storage, const Row& row, int64_t offset) {
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), c10::scalarTypeToTypeMeta(row.dtype));
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  if (row.flags & kStrided) {
    impl->set_sizes_and_strides(row.sizes, row.strides, offset);
  } else {
    impl->set_sizes_contiguous(row.sizes);
    impl->set_storage_offset(offset);
  }
  return tensor;
}

at::Tensor empty_tensor(const Row& row) {
  if (!row.device.is_cpu()) return on_device({}, row.dtype, row.sizes, row.strides, 0, row.device);
  c10::Allocator* const allocator = c10::GetDefaultCPUAllocator();
  return cpu_tensor(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), 0, allocator, true), row,
                    0);
}

// Reads where the elements are, and makes the tensor of them.
at::Tensor read_elements(WireReader& body, const std::vector<transport::Piece>& pieces, Storages& storages,
                         const Row& row) {
  const auto index = body.get<uint32_t>();
  const auto at = body.get<uint64_t>();
  if (index >= pieces.size()) corrupt_tensor("bytes that did not come");
  const transport::Piece& piece = pieces[index];
  const auto bytes = static_cast<size_t>(row.bytes);
  if (at > piece.bytes || bytes > piece.bytes - at) corrupt_tensor("it ends after its bytes");
  if (at % static_cast<uint64_t>(row.item) != 0) corrupt_tensor("it begins within an element");
  const int64_t offset = static_cast<int64_t>(at) / row.item;
  if (!row.device.is_cpu())
    return on_device(storages.on(row.device, row.place, index), row.dtype, row.sizes, row.strides, offset, row.device);
  if (reinterpret_cast<uintptr_t>(piece.data) % static_cast<uintptr_t>(std::min<int64_t>(row.item, 8)) == 0)
    return storages.with_counter(cpu_tensor(storages.of(index), row, offset), index);
  // Unaligned: the processor could read it, but C++ does not allow it.
  c10::DataPtr data = c10::GetDefaultCPUAllocator()->allocate(bytes);
  copy_bytes(data.get(), piece.data + at, bytes);
  return cpu_tensor(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), row.bytes,
                                                          std::move(data), c10::GetDefaultCPUAllocator(), true),
                    row, 0);
}

at::Tensor read_row(WireReader& body, const std::vector<transport::Piece>& pieces, Storages& storages, Places places) {
  Row row;
  row.flags = body.get<uint8_t>();
  if (row.flags & ~kKnownFlags) corrupt_tensor("unknown flags");
  if (!(row.flags & kDefined)) {
    if (row.flags) corrupt_tensor("an undefined one with properties");
    return {};
  }
  read_description(body, places, row);
  at::Tensor tensor = row.empty ? empty_tensor(row) : read_elements(body, pieces, storages, row);
  if (row.flags & kQuantized) return read_quantized(body, tensor);
  return with_grad_flag(std::move(tensor), row.flags);
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
