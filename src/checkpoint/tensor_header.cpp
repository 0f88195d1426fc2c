#include "checkpoint/tensor_header.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <optional>
#include <tuple>

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
                                                                   {"F8_E4M3", at::kFloat8_e4m3fn}};

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
  if (length > given.size() - kHeaderAt) ends("header of ", length, " bytes");
  return given.substr(0, kHeaderAt + length);
}

json parsed_header(std::string_view head, const FileErrors& errors) {
  json header = json::parse(head.substr(kHeaderAt), nullptr, false);
  if (!header.is_object()) errors.fail(kHeaderAt, "the header is not JSON");
  return header;
}

std::vector<StoredTensor> stored_tensors(const json& header, uint64_t data_bytes, const FileErrors& errors) {
  std::vector<StoredTensor> tensors;
  for (const auto& [name, about] : header.items()) {
    if (name == "__metadata__") continue;
    const auto dtype = about.at("dtype").get<std::string>();
    const auto type = dtype_named(dtype);
    if (!type) errors.fail(kHeaderAt, "tensor '", name, "' has the unknown dtype '", dtype, "'");
    StoredTensor tensor{.name = name, .dtype = *type, .sizes = about.at("shape").get<std::vector<int64_t>>()};
    std::tie(tensor.begin, tensor.end) = about.at("data_offsets").get<std::pair<uint64_t, uint64_t>>();
    uint64_t bytes = c10::elementSize(*type), stride = bytes;  // as if no size were 0: strides must not overflow either
    for (const int64_t size : tensor.sizes) {
      if (size < 0 || __builtin_mul_overflow(stride, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &stride) ||
          stride > kMostBytes)
        errors.fail(kHeaderAt, "tensor '", name, "' has an impossible shape");
      bytes *= static_cast<uint64_t>(size);
    }
    if (tensor.begin > tensor.end || tensor.end - tensor.begin != bytes)
      errors.fail(kHeaderAt, "tensor '", name, "' does not have the bytes of its shape");
    tensors.push_back(std::move(tensor));
  }
  std::sort(tensors.begin(), tensors.end(), [](const StoredTensor& a, const StoredTensor& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
  uint64_t end = 0;
  for (const StoredTensor& tensor : tensors) {
    if (tensor.begin != end || tensor.end > data_bytes)
      errors.fail(kHeaderAt, "tensor '", tensor.name, "' does not lie where the other tensors and the file place it");
    end = tensor.end;
  }
  if (end != data_bytes) errors.fail(kHeaderAt, data_bytes - end, " bytes belong to no tensor");
  return tensors;
}

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

std::string head_from(std::string json) {
  json.resize((kHeaderAt + json.size() + kAlignment - 1) / kAlignment * kAlignment - kHeaderAt, ' ');
  const uint64_t length = json.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + json;
}

std::string dump(const json& json) {
  try {
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(text("a tensor's name must be UTF-8: ", error.what()), "Rename it");
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
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw_errno(text("cannot read ", path.string()), advice);
  bytes = static_cast<uint64_t>(status.st_size);
  return fd;
}

}  // namespace muster::checkpoint
