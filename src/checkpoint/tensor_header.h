// The header of safetensors files, which snapshots (container.h) and plain files (safetensors.h) share: which tensors
// there are, and where.
//
//     0   8  bytes of the header, little-endian
//     8      the header: JSON, "name": {"dtype": "F32", "shape": […], "data_offsets": [begin, end]} for each tensor,
//            and "__metadata__": {"key": "value", …}; blanks may follow
//     …      the tensors; offsets are counted from here, and there are no gaps
//
// Thread-safety: values, and functions without state. Source: the format of Hugging Face's safetensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::checkpoint {

inline constexpr size_t kHeaderAt = 8;
inline constexpr uint64_t kMostBytes = uint64_t{1} << 62;  // of a file
inline constexpr uint64_t kMostHeaderBytes = 100'000'000;  // as the safetensors library

// Errors that name a file and a byte.
class FileErrors {
 public:
  FileErrors(std::string file, std::string advice) : file_(std::move(file)), advice_(std::move(advice)) {}

  // Of a file that may be intact: fail<Unavailable>().
  template <typename ErrorType = CorruptError, typename... Words>
  [[noreturn]] void fail(uint64_t byte, const Words&... words) const {
    throw ErrorType(text(file_, ", byte ", byte, ": ", words...), advice_);
  }
  // Runs fn(). If it finds that the header's JSON lacks a field or has one of the wrong type, throws CorruptError.
  template <typename Fn>
  auto understood(Fn&& fn) const {
    try {
      return fn();
    } catch (const nlohmann::json::exception& error) {
      fail(kHeaderAt, "the header lacks something: ", error.what());
    }
  }

 private:
  std::string file_, advice_;
};

struct StoredTensor {
  std::string name;
  std::string dtype_in_file;
  at::ScalarType dtype = at::ScalarType::Undefined;  // if libtorch lacks it
  std::vector<int64_t> sizes;
  uint64_t begin = 0, end = 0;  // counted from the end of the header
};

// The first bytes of a file, up to the tensors. `given` may have fewer, even none; they are a CorruptError then.
std::string_view head_in(std::string_view given, const FileErrors& errors);
nlohmann::json parsed_header(std::string_view head, const FileErrors& errors);
// In the file's order. CorruptError unless the tensors fill `data_bytes`.
std::vector<StoredTensor> stored_tensors(const nlohmann::json& header, uint64_t data_bytes, const FileErrors& errors);

// The order in a file: tensors with larger elements come first, so that all are aligned without gaps.
bool comes_first(const at::Tensor& a, const at::Tensor& b);
// What a header says of a tensor that begins at `begin`. One whose dtype safetensors files lack (complex128) is
// described as the bytes of its elements, in one more dimension.
nlohmann::json description_of(const at::Tensor& tensor, uint64_t begin);
bool has_name_in_files(at::ScalarType dtype);
// From the header's JSON: blanks are added, so that the tensors begin at a multiple of 64 bytes and not before
// `at_least`, and the length. InvalidArgument if it is too long for other readers.
std::string head_from(std::string json, size_t at_least = 0);
// InvalidArgument if a name is not UTF-8.
std::string dump(const nlohmann::json& json);

std::string_view bytes_of(const at::Tensor& tensor);  // contiguous
// A tensor in the memory of `bytes`.
at::Tensor view_of(const at::Tensor& bytes, uint64_t offset, at::ScalarType dtype, at::IntArrayRef sizes);

// Unavailable, with `advice`, if it cannot be read or is not a regular file.
UniqueFd open_to_read(const std::filesystem::path& path, const std::string& advice, uint64_t& bytes);

}  // namespace muster::checkpoint
