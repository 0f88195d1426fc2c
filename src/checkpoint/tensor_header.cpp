#include "checkpoint/tensor_header.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>

#include "base/utf8.h"

namespace muster::checkpoint {
namespace {

using nlohmann::json;

constexpr size_t kAlignment = 64;  // of the first tensor

constexpr std::pair<std::string_view, at::ScalarType> kDtypes[] = {{"F64", at::kDouble},
                                                                   {"F32", at::kFloat},
                                                                   {"F16", at::kHalf},
                                                                   {"BF16", at::kBFloat16},
                                                                   {"I64", at::kLong},
                                                                   {"I32", at::kInt},
                                                                   {"I16", at::kShort},
                                                                   {"I8", at::kChar},
                                                                   {"U8", at::kByte},
                                                                   {"BOOL", at::kBool},
                                                                   {"U64", at::kUInt64},
                                                                   {"U32", at::kUInt32},
                                                                   {"U16", at::kUInt16},
                                                                   {"F8_E5M2", at::kFloat8_e5m2},
                                                                   {"F8_E4M3", at::kFloat8_e4m3fn},
                                                                   {"F8_E5M2FNUZ", at::kFloat8_e5m2fnuz},
                                                                   {"F8_E4M3FNUZ", at::kFloat8_e4m3fnuz},
                                                                   {"F8_E8M0", at::kFloat8_e8m0fnu},
                                                                   {"C64", at::kComplexFloat}};

std::string_view name_in_files(at::ScalarType dtype) {
  for (const auto& [name, type] : kDtypes)
    if (type == dtype) return name;
  return "";
}
std::optional<at::ScalarType> dtype_named(std::string_view in_file) {
  for (const auto& [name, type] : kDtypes)
    if (name == in_file) return type;
  return std::nullopt;
}

}  // namespace

std::string_view head_in(std::string_view given, const FileErrors& errors) {
  const auto ends = [&](const auto&... words) {
    errors.fail(given.size(), "the file ends here, within its ", words...);
  };
  if (given.size() < kHeaderAt) ends("first ", kHeaderAt, " bytes");
  uint64_t length = 0;
  std::memcpy(&length, given.data(), sizeof length);
  if (length > kMostHeaderBytes) errors.fail(0, "a header of ", length, " bytes is longer than any is");
  if (length > given.size() - kHeaderAt) ends("header of ", length, " bytes");
  return given.substr(0, kHeaderAt + length);
}

json parsed_header(std::string_view head, const FileErrors& errors) {
  const auto written = head.substr(kHeaderAt);
  json header = json::parse(written, nullptr, false);
  if (!written.starts_with('{') || written.find('\0') != std::string_view::npos || !header.is_object())
    errors.fail(kHeaderAt, "the header is not a JSON object");
  return header;
}

std::vector<StoredTensor> stored_tensors(const json& header, uint64_t data_bytes, const FileErrors& errors) {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, about] : header.items()) {
    if (name == "__metadata__") continue;
    StoredTensor tensor{.name = name, .dtype_in_file = about.at("dtype").get<std::string>()};
    const auto type = dtype_named(tensor.dtype_in_file);
    if (type) tensor.dtype = *type;
    // As if no size were 0: strides must not overflow either.
    uint64_t bytes = type ? c10::elementSize(*type) : 1, stride = bytes;
    const json& shape = about.at("shape");
    if (!shape.is_array()) errors.fail(kHeaderAt, "tensor '", shortened(name), "' has an impossible shape");
    for (const json& size : shape) {
      if (!size.is_number_unsigned() ||
          __builtin_mul_overflow(stride, std::max<uint64_t>(size.get<uint64_t>(), 1), &stride) || stride > kMostBytes)
        errors.fail(kHeaderAt, "tensor '", shortened(name), "' has an impossible shape");
      tensor.sizes.push_back(size.get<int64_t>());
      bytes *= size.get<uint64_t>();
    }
    const json& offsets = about.at("data_offsets");
    if (offsets.size() != 2 || !offsets.at(0).is_number_unsigned() || !offsets.at(1).is_number_unsigned())
      errors.fail(kHeaderAt, "tensor '", shortened(name), "' has impossible offsets");
    tensor.begin = offsets[0].get<uint64_t>();
    tensor.end = offsets[1].get<uint64_t>();
    if (tensor.begin > tensor.end || (type && tensor.end - tensor.begin != bytes))
      errors.fail(kHeaderAt, "tensor '", shortened(name), "' does not have the bytes of its shape");
    tensors.push_back(std::move(tensor));
  }
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != end || tensor.end > data_bytes)
      errors.fail(kHeaderAt, "tensor '", shortened(tensor.name),
                  "' does not lie where the other tensors and the file place it");
    end = tensor.end;
  }
  if (end != data_bytes) errors.fail(kHeaderAt, data_bytes - end, " bytes belong to no tensor");
  return tensors;
}

bool comes_first(const at::Tensor& a, const at::Tensor& b) { return a.element_size() > b.element_size(); }

json description_of(const at::Tensor& tensor, uint64_t begin) {
  std::string_view dtype = name_in_files(tensor.scalar_type());
  auto shape = tensor.sizes().vec();
  if (dtype.empty()) {
    dtype = name_in_files(at::kByte);
    shape.push_back(static_cast<int64_t>(tensor.element_size()));
  }
  return {{"dtype", dtype}, {"shape", shape}, {"data_offsets", {begin, begin + tensor.nbytes()}}};
}

bool has_name_in_files(at::ScalarType dtype) { return !name_in_files(dtype).empty(); }

std::string head_from(std::string json, size_t at_least) {
  const size_t size = std::max(kHeaderAt + json.size(), at_least);
  json.resize((size + kAlignment - 1) / kAlignment * kAlignment - kHeaderAt, ' ');
  const uint64_t length = json.size();
  if (length > kMostHeaderBytes)
    throw InvalidArgument(
        text("the tensors' names and shapes take ", length, " bytes, more than a safetensors file has"),
        "Store fewer and larger tensors in it");
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + json;
}

std::string dump(const json& json) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(text("names and metadata must be UTF-8: ", error.what()), "Rename it");
  }
}

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Tensor view_of(const at::Tensor& bytes, uint64_t offset, at::ScalarType dtype, at::IntArrayRef sizes) {
  const auto count = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, static_cast<int64_t>(offset), count).view(dtype).view(sizes);
}

UniqueFd open_to_read(const std::filesystem::path& path, const std::string& advice, uint64_t& bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // does not wait for a pipe's other end
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw_errno(text("cannot read ", path.string()), advice);
  if (!S_ISREG(status.st_mode))
    throw Unavailable(text("cannot read ", path.string(), ": it is not a regular file"), advice);
  bytes = static_cast<uint64_t>(status.st_size);
  return fd;
}

}  // namespace muster::checkpoint
