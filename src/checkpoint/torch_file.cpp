#include "checkpoint/torch_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "base/atomic_file.h"
#include "base/text.h"
#include "base/utf8.h"
#include "checkpoint/item_values.h"
#include "checkpoint/tensor_header.h"
#include "checkpoint/torch_pickle.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

using Tensors = std::map<std::string, at::Tensor>;

constexpr const char* kSaveAgain = "Save it again with torch.save()";

// The records of a file, each of which is read at most once.
class Records {
 public:
  explicit Records(std::string path) : path_(std::move(path)) {
    open_to_read(path_, "", file_bytes_);
    if (!is_torch_file(path_))
      throw CorruptError(text(path_, " is not a file of torch.save() of PyTorch 1.6 or later"), kSaveAgain);
    understood([&] { reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path_); });
  }

  std::optional<at::Tensor> read(const std::string& name) {
    if (!understood([&] { return reader_->hasRecord(name); })) return std::nullopt;
    const uint64_t bytes = understood([&] { return reader_->getRecordSize(name); });
    if (bytes > file_bytes_ - read_bytes_)
      throw CorruptError(
          text(path_, " has records of more bytes than the file: one is compressed, or lies within another"),
          kSaveAgain);
    read_bytes_ += bytes;
    const at::Tensor record = at::empty({static_cast<int64_t>(bytes)}, at::kByte);
    if (bytes > 0) understood([&] { return reader_->getRecord(name, record.mutable_data_ptr(), bytes); });
    return record;
  }

 private:
  template <typename Fn>
  std::invoke_result_t<Fn> understood(Fn&& fn) const {
    try {
      return fn();
    } catch (const c10::Error& error) {
      std::string_view what = error.what_without_backtrace();
      what = what.substr(0, std::min(what.find('\n'), what.find(". ")));  // what follows says what may have happened
      throw CorruptError(text(path_, " is not a file of torch.save(): ", shortened(what, 300)), kSaveAgain);
    }
  }

  const std::string path_;
  uint64_t file_bytes_ = 0, read_bytes_ = 0;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
};

}  // namespace

bool is_torch_file(const std::string& path) {
  uint64_t bytes = 0;
  const UniqueFd fd = open_to_read(path, "", bytes);
  std::array<char, 9> start{};
  if (::pread(fd.get(), start.data(), start.size(), 0) != static_cast<ssize_t>(start.size())) return false;
  // These may be the length of a safetensors file's header, which begins behind it.
  return std::string_view(start.data(), 4) == "PK\x03\x04" && start[kHeaderAt] != '{';
}

Tensors tensors_of_torch_file(const std::string& path) {
  if (!std::filesystem::exists(path)) throw Unavailable(text(path, " does not exist"));
  Records records(path);
  if (const auto order = records.read("byteorder"); order && bytes_of(*order) != "little")
    throw InvalidArgument(
        text(path, " has numbers of the byte order '", shortened(bytes_of(*order)), "', and 'little' is read"),
        "Save it again on a little-endian machine");
  const auto pickle = records.read("data.pkl");
  if (!pickle) throw CorruptError(text(path, " is not a file of torch.save(): it has no data.pkl"), kSaveAgain);
  return tensors_in_pickle(bytes_of(*pickle), path,
                           [&](const std::string& key) { return records.read("data/" + key); });
}

void write_torch_file(const std::string& path, const Tensors& tensors) {
  for (const auto& [name, tensor] : tensors) require_storable(tensor, name);
  const std::string pickle = pickle_of(tensors);
  AtomicFile file(path);
  std::exception_ptr problem;
  // The writer ends the archive when it is destroyed, and must not throw then.
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* bytes, size_t size) {
    try {
      if (!problem) file.write({static_cast<const char*>(bytes), size});
    } catch (...) {
      problem = std::current_exception();
    }
    return size;
  });
  constexpr std::string_view kOrder = "little";
  writer.writeRecord("data.pkl", pickle.data(), pickle.size());
  writer.writeRecord("byteorder", kOrder.data(), kOrder.size());
  size_t key = 0;
  for (const auto& [name, tensor] : tensors) {
    if (problem) break;
    const at::Tensor stored = storable(tensor, name);  // one copy at a time
    writer.writeRecord(text("data/", key++), stored.const_data_ptr(), stored.nbytes());
  }
  writer.writeEndOfFile();
  if (problem) std::rethrow_exception(problem);
  file.commit(false);
}

}  // namespace muster::checkpoint
