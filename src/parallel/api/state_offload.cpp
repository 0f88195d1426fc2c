#include "muster/parallel/state_offload.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "optim/torch_states.h"
#include "parallel/kit/buckets.h"
#include "parallel/kit/state_owner.h"
#include "shm/mapping.h"

namespace muster {
namespace {

namespace fs = std::filesystem;

void release(void* mapping) { const std::unique_ptr<shm::Mapping> last(static_cast<shm::Mapping*>(mapping)); }
bool is_in_file(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.storage().data_ptr().get_deleter() == &release;
}

[[noreturn]] void throw_no_file(int error, const fs::path& folder, size_t bytes) {
  throw_errno(error, text("cannot make a file of ", bytes, " bytes for an optimizer's state in ", folder.string()),
              "Name a folder on a disk with room for all states");
}

// A file without a name.
UniqueFd make_file(const fs::path& folder, size_t bytes) {
  UniqueFd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (!file && (errno == EOPNOTSUPP || errno == EISDIR)) {  // not on this file system
    std::string name = (folder / "muster-state-XXXXXX").string();
    file = UniqueFd(::mkostemp(name.data(), O_CLOEXEC));
    if (file) ::unlink(name.c_str());
  }
  if (!file) throw_no_file(errno, folder, bytes);
  // Room on the disk now, because a write through the mapping could only end with a signal.
  int error = EINTR;
  while (error == EINTR) error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) throw_no_file(error, folder, bytes);
  return file;
}

// A tensor like this one, in a file, filled with zeros.
at::Tensor zeros_in_file(const at::Tensor& like, const fs::path& folder) {
  const size_t bytes = like.nbytes();
  const UniqueFd file = make_file(folder, bytes);
  void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED) throw_no_file(errno, folder, bytes);
  auto mapping = std::make_unique<shm::Mapping>(static_cast<std::byte*>(data), bytes);
  return parallel::tensor_at({data, mapping.release(), &release, c10::Device(c10::DeviceType::CPU)}, like);
}

void for_each_tensor(torch::optim::Optimizer& optimizer, const auto& fn) {
  for (auto& [parameter, state] : optimizer.state())
    for (const optim::Field& field : optim::fields_of(*state))
      if (field.tensor && field.tensor->defined()) fn(*field.tensor);
}

}  // namespace

StateOffload::StateOffload(torch::optim::Optimizer& optimizer, StateOffloadOptions options)
    : optimizer_(optimizer), options_(std::move(options)) {
  const at::NoGradGuard no_grad;
  if (!fs::is_directory(options_.folder))
    throw Unavailable(text("the folder for states, ", options_.folder.string(), ", does not exist"), "Make it before");
  const std::type_info& type = parallel::class_of(optimizer_);
  std::vector<std::pair<void*, optim::State>> made;
  for (const auto& group : optimizer_.param_groups()) {
    const auto fields = optim::zeros_of_first_step(type, group);
    for (const at::Tensor& parameter : group.params()) {
      if (fields.empty() || parameter.is_complex() || !is_large(parameter) || !parameter.requires_grad() ||
          !parameter.device().is_cpu() || !parallel::keeps_state(optimizer_, parameter) ||
          optimizer_.state().count(parameter.unsafeGetTensorImpl()) > 0)
        continue;
      optim::State state = optim::new_state_for(type);
      for (const optim::Field& field : optim::fields_of(*state))
        if (std::find(fields.begin(), fields.end(), field.name) != fields.end())
          *field.tensor = zeros_in_file(parameter, options_.folder);
      made.emplace_back(parameter.unsafeGetTensorImpl(), std::move(state));
    }
  }
  move();
  for (auto& [parameter, state] : made) optimizer_.state()[parameter] = std::move(state);
}

void StateOffload::step() {
  optimizer_.step();
  move();
}

void StateOffload::move() {
  const at::NoGradGuard no_grad;
  for_each_tensor(optimizer_, [&](at::Tensor& tensor) {
    if (!tensor.device().is_cpu() || !is_large(tensor) || is_in_file(tensor)) return;
    at::Tensor moved = zeros_in_file(tensor, options_.folder);
    moved.copy_(tensor);
    tensor = std::move(moved);
  });
}

// Sparse ones, as the momentum of sparse gradients, stay in memory.
bool StateOffload::is_large(const at::Tensor& tensor) const {
  return tensor.layout() == at::kStrided && tensor.nbytes() >= std::max<size_t>(options_.min_bytes, 1);
}

size_t StateOffload::bytes() const {
  size_t sum = 0;
  for_each_tensor(optimizer_, [&](const at::Tensor& tensor) { sum += is_in_file(tensor) ? tensor.nbytes() : 0; });
  return sum;
}

}  // namespace muster
