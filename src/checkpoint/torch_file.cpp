#include "checkpoint/torch_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <caffe2/serialize/inline_container.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
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

// The directories of a zip archive, which stand at its end: the one of 32 bits, and that of 64 bits before it.
// libtorch's reader inflates a record before anybody can ask how large it becomes, so this looks whether there is a
// compressed one.
class ZipDirectory {
 public:
  ZipDirectory(const UniqueFd& fd, uint64_t file_bytes) : fd_(fd), file_bytes_(file_bytes) {
    constexpr uint64_t kEnd = 22, kMostComment = 0xffff, kLocator = 20;
    const uint64_t begin = file_bytes - std::min(file_bytes, kEnd + kMostComment + kLocator);
    const std::string tail = bytes(begin, file_bytes - begin);
    const size_t end = tail.size() < kEnd ? std::string::npos : tail.rfind("PK\5\6", tail.size() - kEnd);
    if (end == std::string::npos) return;
    look_through(number<uint32_t>(tail, end + 16), number<uint32_t>(tail, end + 12));
    if (end < kLocator || tail.compare(end - kLocator, 4, "PK\6\7") != 0) return;
    const std::string large = bytes(number<uint64_t>(tail, end - kLocator + 8), 56);
    if (large.size() == 56) look_through(number<uint64_t>(large, 48), number<uint64_t>(large, 40));
  }
  bool any_is_compressed() const { return any_is_compressed_; }

 private:
  template <typename Number>
  static Number number(const std::string& bytes, size_t at) {
    Number value;
    std::memcpy(&value, bytes.data() + at, sizeof value);
    return value;
  }
  std::string bytes(uint64_t begin, uint64_t count) const {
    if (begin > file_bytes_ || count > file_bytes_ - begin) return {};
    std::string all(count, 0);
    for (size_t got = 0; got < all.size();) {
      const ssize_t more = ::pread(fd_.get(), all.data() + got, all.size() - got, static_cast<off_t>(begin + got));
      if (more <= 0) return {};
      got += static_cast<size_t>(more);
    }
    return all;
  }
  void look_through(uint64_t begin, uint64_t count) {
    constexpr size_t kEntry = 46;
    const std::string all = bytes(begin, count);
    for (size_t at = 0; at + kEntry <= all.size() && all.compare(at, 4, "PK\1\2") == 0;) {
      any_is_compressed_ |= number<uint16_t>(all, at + 10) != 0;
      at += kEntry + number<uint16_t>(all, at + 28) + number<uint16_t>(all, at + 30) + number<uint16_t>(all, at + 32);
    }
  }

  const UniqueFd& fd_;
  const uint64_t file_bytes_;
  bool any_is_compressed_ = false;
};

// The records of a file, each of which is read at most once.
class Records {
 public:
  explicit Records(std::string path) : path_(std::move(path)) {
    const UniqueFd fd = open_to_read(path_, "", file_bytes_);
    if (!is_torch_file(path_))
      throw CorruptError(text(path_, " is not a file of torch.save() of PyTorch 1.6 or later"), kSaveAgain);
    if (ZipDirectory(fd, file_bytes_).any_is_compressed())
      throw CorruptError(text(path_, " has a compressed record"), kSaveAgain);
    understood([&] { reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path_); });
  }

  std::optional<at::Tensor> read(const std::string& name) {
    if (!understood([&] { return reader_->hasRecord(name); })) return std::nullopt;
    const uint64_t bytes = understood([&] { return reader_->getRecordSize(name); });
    if (bytes > file_bytes_ - read_bytes_)
      throw CorruptError(text(path_, " has records of more bytes than the file: one lies within another"), kSaveAgain);
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
        text(path, ": expected numbers of the byte order 'little', got '", shortened(bytes_of(*order)), "'"),
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
    const at::Tensor stored = on_host(storable(tensor, name));  // one copy at a time
    writer.writeRecord(text("data/", key++), stored.const_data_ptr(), stored.nbytes());
  }
  writer.writeEndOfFile();
  if (problem) std::rethrow_exception(problem);
  file.commit(true);
}

}  // namespace muster::checkpoint
