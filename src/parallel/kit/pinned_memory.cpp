#include "parallel/kit/pinned_memory.h"

#include <c10/core/DeviceGuard.h>
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/log.h"

namespace muster::parallel {
namespace {

// Functions of the CUDA runtime that libtorch has loaded. So Muster needs neither its headers nor the library.
struct Runtime {
  int (*pin)(void*, size_t, unsigned) = nullptr;
  int (*unpin)(void*) = nullptr;
  int (*clear_error)() = nullptr;
  explicit operator bool() const { return pin && unpin && clear_error; }
};

Runtime find_runtime() {
  std::string path;
  ::dl_iterate_phdr(
      [](::dl_phdr_info* library, size_t, void* found) {
        const std::string_view name = library->dlpi_name;
        if (name.substr(name.rfind('/') + 1).starts_with("libcudart.so")) *static_cast<std::string*>(found) = name;
        return 0;
      },
      &path);
  Runtime runtime;
  if (path.empty()) return runtime;
  void* const library = ::dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return runtime;
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
  };
  find(runtime.pin, "cudaHostRegister");
  find(runtime.unpin, "cudaHostUnregister");
  find(runtime.clear_error, "cudaGetLastError");
  return runtime;
}
const Runtime& runtime() {
  static const Runtime one = find_runtime();
  return one;
}

constexpr unsigned kForAllContexts = 1;  // cudaHostRegisterPortable

}  // namespace

std::shared_ptr<PinnedMemory> PinnedMemory::of(const std::shared_ptr<shm::Mapping>& memory, const c10::Device& device) {
  static std::mutex mutex;
  static std::map<const shm::Mapping*, std::weak_ptr<PinnedMemory>> all;
  const std::lock_guard lock(mutex);
  std::erase_if(all, [](const auto& each) { return each.second.expired(); });
  auto& known = all[memory.get()];
  auto pinned = known.lock();
  if (!pinned) known = pinned = std::make_shared<PinnedMemory>(memory, device);
  return pinned;
}

PinnedMemory::PinnedMemory(std::shared_ptr<shm::Mapping> memory, const c10::Device& device)
    : memory_(std::move(memory)) {
  if (!device.is_cuda() || !runtime()) return;
  const c10::DeviceGuard guard(device);
  const int error = runtime().pin(memory_->data(), memory_->size(), kForAllContexts);
  is_pinned_ = error == 0;
  if (is_pinned_) return;
  runtime().clear_error();
  MUSTER_LOG(kWarning) << "copies of parameters to " << device << " are slow, because " << memory_->size()
                       << " bytes of them could not be pinned (CUDA's error " << error << ")";
}

PinnedMemory::~PinnedMemory() {
  if (is_pinned_ && runtime().unpin(memory_->data()) != 0) runtime().clear_error();
}

}  // namespace muster::parallel
