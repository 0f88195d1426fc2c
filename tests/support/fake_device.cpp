#include "support/fake_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace muster::test {
namespace {

std::atomic<size_t> bytes_there{0}, unblocked_copies{0};
thread_local c10::DeviceIndex current = 0;

struct Block;
// By address, as a device finds them; a pointer to memory that was freed finds none.
std::mutex blocks_mutex;
std::map<const std::byte*, const Block*>& blocks() {
  static auto* const all = new std::map<const std::byte*, const Block*>;
  return *all;
}

// What an address on a device stands for.
struct Block {
  Block(size_t bytes, c10::DeviceIndex device)
      : bytes(bytes),
        device(device),
        address(::mmap(nullptr, std::max<size_t>(bytes, 1), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
        memory(new std::byte[std::max<size_t>(bytes, 1)]) {
    TORCH_CHECK(address != MAP_FAILED, "no room for the memory of a fake device");
    const std::lock_guard lock(blocks_mutex);
    blocks().emplace(static_cast<std::byte*>(address), this);
    bytes_there += bytes;
  }
  ~Block() {
    const std::lock_guard lock(blocks_mutex);
    blocks().erase(static_cast<std::byte*>(address));
    bytes_there -= bytes;
    ::munmap(address, std::max<size_t>(bytes, 1));
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  const size_t bytes;
  const c10::DeviceIndex device;
  void* const address;                        // for others
  const std::unique_ptr<std::byte[]> memory;  // for the kernels here
};

void free_block(void* block) { delete static_cast<Block*>(block); }

class FakeAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto block = std::make_unique<Block>(bytes, current);
    void* const address = block->address;
    return {bytes ? address : nullptr, block.release(), &free_block, fake(current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not for a fake device"); }
};
FakeAllocator& allocator() {
  static auto* const one = new FakeAllocator;
  return *one;
}

class FakeGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override { return fake(std::exchange(current, device.index())); }
  c10::Device getDevice() const override { return fake(current); }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }
  // There is one stream per device, and all work is complete when the call that requests it returns.
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};

// The CPU's memory; nothing is in the way of a copy from or to it.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return c10::GetCPUAllocator()->allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

class FakeHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kFakeDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  // torch::manual_seed() sets it; nothing draws from it.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const auto* const all = new std::array<at::Generator, kFakeDevices>{
        at::detail::createCPUGenerator(), at::detail::createCPUGenerator(), at::detail::createCPUGenerator()};
    return all->at(static_cast<size_t>(index));
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* const one = new PinnedAllocator;
    return one;
  }
};

// --- kernels ---

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  const auto index = device && device->has_index() ? device->index() : current;
  TORCH_CHECK(index >= 0 && index < kFakeDevices, "there is no fake device ", int{index});
  return index;
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(fake(index_of(device)));
  return at::detail::empty_generic(sizes, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(fake(index_of(device)));
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const Block& block_at(const void* address) {
  const std::lock_guard lock(blocks_mutex);
  const auto at = blocks().find(static_cast<const std::byte*>(address));
  TORCH_CHECK(at != blocks().end(), "a tensor on a fake device without memory");
  return *at->second;
}

// The tensor's elements as a tensor of the CPU, in place.
at::Tensor seen(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), at::TensorOptions(tensor.scalar_type()));
  const Block& block = block_at(tensor.storage().data());
  TORCH_CHECK(block.device == tensor.device().index(), "a tensor with the memory of another device");
  const size_t offset = static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
  const at::Tensor plain = at::from_blob(block.memory.get() + offset, tensor.sizes(), tensor.strides(),
                                         at::TensorOptions(tensor.scalar_type()));
  return tensor.is_conj() ? plain.conj() : plain;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (non_blocking) ++unblocked_copies;
  if (self.numel() != 0) seen(to).copy_(seen(self));
  return to;
}

at::Tensor& set(at::Tensor& self, c10::Storage storage, int64_t offset, c10::IntArrayRef sizes,
                c10::IntArrayRef strides) {
  TORCH_CHECK(storage.device() == self.device(), "set_ with a storage of another device");
  c10::TensorImpl* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) {
    at::Tensor room = empty(self.sizes(), to.scalar_type(), {}, to.device(), {}, {}), mutable_to = to;
    set(mutable_to, room.storage(), 0, room.sizes(), room.strides());
  }
  return copy_from(self, to, false);
}

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>()); }

const bool registered = [] {
  c10::register_privateuse1_backend("fake");  // the engine asks for streams of those only that have a name
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &allocator());
  at::RegisterPrivateUse1HooksInterface(new FakeHooks);
  static const c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::PrivateUse1, new FakeGuard);
  return true;
}();

}  // namespace

FakeDeviceCounts fake_device_counts() {
  const std::lock_guard lock(blocks_mutex);
  return {.blocks = blocks().size(), .bytes = bytes_there.load(), .unblocked_copies = unblocked_copies.load()};
}

}  // namespace muster::test
