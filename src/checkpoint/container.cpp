#include "checkpoint/container.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/fd.h"
#include "muster/base/error.h"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace muster::checkpoint {
namespace {

using nlohmann::json;

// How every header begins; 16 hexadecimal digits follow.
constexpr std::string_view kStart = R"({"__metadata__":{"checksum":")";
constexpr size_t kDigits = 16, kDigitsAt = kHeaderAt + kStart.size();
constexpr size_t kAlignment = 64;              // of the first tensor
constexpr uint64_t kMost = uint64_t{1} << 62;  // bytes of a file

constexpr const char* kOlder = "The snapshot before it, if there is one, is used instead";

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

std::vector<uint64_t> block_sums(std::string_view bytes) {
  std::vector<uint64_t> sums;
  for (size_t at = 0; at < bytes.size(); at += kBlockBytes) sums.push_back(checksum(bytes.substr(at, kBlockBytes)));
  return sums;
}

std::string hexadecimal(uint64_t number) {
  std::string digits(kDigits, '0');
  for (size_t i = 0; i < kDigits; ++i) digits[i] = "0123456789abcdef"[number >> (60 - 4 * i) & 15];
  return digits;
}

// Of a file's length and header, as if the digits of the checksum were zeros.
uint64_t sum_of_head(std::string_view head) {
  static constexpr std::array<char, kDigits> kNone{'0', '0', '0', '0', '0', '0', '0', '0',
                                                   '0', '0', '0', '0', '0', '0', '0', '0'};
  XXH3_state_t state;
  XXH3_64bits_reset(&state);
  XXH3_64bits_update(&state, head.data(), kDigitsAt);
  XXH3_64bits_update(&state, kNone.data(), kDigits);
  XXH3_64bits_update(&state, head.data() + kDigitsAt + kDigits, head.size() - kDigitsAt - kDigits);
  return XXH3_64bits_digest(&state);
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i)
    if (const auto type = static_cast<at::ScalarType>(i); name == c10::toString(type)) return type;
  return std::nullopt;
}

// The dtypes that safetensors files have. A tensor of another is stored as the bytes of its elements.
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
constexpr std::string_view kBytes = "U8";

// Empty if there is none.
std::string_view name_in_file(at::ScalarType type) {
  const auto* const found =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& each) { return each.second == type; });
  return found == std::end(kDtypes) ? "" : found->first;
}
std::optional<at::ScalarType> dtype_in_file(const std::string& name) {
  const auto* const found =
      std::find_if(std::begin(kDtypes), std::end(kDtypes), [&](const auto& each) { return each.first == name; });
  return found == std::end(kDtypes) ? std::nullopt : std::optional(found->second);
}

// What precedes the tensors.
struct Head {
  std::string_view bytes;   // of the file
  json tensors;             // by name, and "__metadata__"
  json muster;              // Muster's part of the metadata
  uint64_t data_bytes = 0;  // of the tensors
  uint64_t file_bytes() const { return bytes.size() + data_bytes; }
};

// Verifies the parts of a file. Its errors name the file, the byte and the problem.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  template <typename... Words>
  [[noreturn]] void fail(uint64_t byte, const Words&... words) const {
    throw CorruptError(text(file_, ", byte ", byte, ": ", words...), kOlder);
  }

  // Runs fn(). If fn() finds that the header's JSON lacks a field or has one of the wrong type, throws Corrupt.
  template <typename Fn>
  auto understood(Fn&& fn) const {
    try {
      return fn();
    } catch (const json::exception& error) {
      fail(kHeaderAt, "the header lacks something: ", error.what());
    }
  }

  // `given` are the file's first bytes; there may be fewer than a head needs, even none.
  Head head(std::string_view given) const {
    const auto ends = [&](const auto&... words) { fail(given.size(), "the file ends here, within its ", words...); };
    if (given.size() < kHeaderAt) ends("first ", kHeaderAt, " bytes");
    if (given.substr(kHeaderAt, kStart.size()) != kStart.substr(0, given.size() - kHeaderAt))
      fail(kHeaderAt, "this is not a snapshot");
    if (given.size() < kDigitsAt + kDigits) ends("header");
    uint64_t length = 0;
    std::memcpy(&length, given.data(), kHeaderAt);
    if (length > given.size() - kHeaderAt) ends("header of ", length, " bytes");
    Head head{.bytes = given.substr(0, kHeaderAt + length)};
    if (head.bytes.size() < kDigitsAt + kDigits || (head.bytes.size() % kAlignment) != 0 ||
        head.bytes.substr(kDigitsAt, kDigits) != hexadecimal(sum_of_head(head.bytes)))
      fail(0, "the header (", length, " bytes) is not as it was written");
    // The checksum shows that this was written. Its writer may not have been Muster.
    head.tensors = json::parse(head.bytes.substr(kHeaderAt), nullptr, false);
    if (!head.tensors.is_object()) fail(kHeaderAt, "the header is not JSON");
    understood([&] {
      head.muster = json::parse(head.tensors.at("__metadata__").at("muster").get<std::string>(), nullptr, false);
      if (!head.muster.is_object()) fail(kHeaderAt, "the header's part \"muster\" is not JSON");
      if (const auto version = head.muster.at("version").get<int64_t>(); version != kFormatVersion)
        fail(kHeaderAt, "its format is version ", version, ", and this Muster reads version ", kFormatVersion);
      head.data_bytes = head.muster.at("data_bytes").get<uint64_t>();
      if (head.data_bytes > kMost) fail(kHeaderAt, head.data_bytes, " bytes of tensors do not fit into a file");
    });
    return head;
  }

 private:
  std::string file_;
};

About about_of(const Reader& reader, const json& header) {
  About about{.steps = header.at("steps").get<int64_t>(),
              .world_size = header.at("world_size").get<int>(),
              .rank = header.at("rank").get<int>()};
  for (const auto& shard : header.at("shards"))
    about.shards.push_back(
        {shard.at("file").get<std::string>(), shard.at("bytes").get<uint64_t>(), shard.at("sum").get<uint64_t>()});
  for (const auto& shard : about.shards)  // a manifest from an untrusted source must not refer to other folders
    if (shard.file.empty() || shard.file.front() == '.' || shard.file.find('/') != std::string::npos)
      reader.fail(kHeaderAt, "'", shard.file, "' is not the name of a shard in this folder");
  return about;
}

json header_of(const About& about) {
  json shards = json::array();
  for (const auto& shard : about.shards)
    shards.push_back({{"file", shard.file}, {"bytes", shard.bytes}, {"sum", shard.sum}});
  return {{"version", kFormatVersion},
          {"steps", about.steps},
          {"world_size", about.world_size},
          {"rank", about.rank},
          {"shards", std::move(shards)}};
}

std::string dump(const json& header) {
  try {
    return header.dump();
  } catch (const json::exception& error) {
    throw InvalidArgument(text("a name in a snapshot must be UTF-8: ", error.what()), "Rename it");
  }
}

// An entry and where it lies.
struct Place {
  Entry entry;
  at::ScalarType dtype = at::kByte;
  std::vector<int64_t> sizes;
  uint64_t offset = 0, bytes = 0;
  std::vector<uint64_t> sums;
};

// Reads an entry's description. Tensors must follow each other without a gap, so that every byte has a checksum: this
// one has to begin at `offset`.
Place place_of(const Reader& reader, const Head& head, const json& about, uint64_t offset) {
  Place place{.entry = {.item = about.at("item").get<std::string>(),
                        .name = about.at("name").get<std::string>(),
                        .kind = about.at("kind").get<std::string>(),
                        .rank = about.at("rank").get<int>(),
                        .order = about.at("order").get<int64_t>()},
              .offset = offset,
              .sums = about.at("sums").get<std::vector<uint64_t>>()};
  const std::string name = place.entry.full_name();
  const json& tensor = head.tensors.at(name);
  place.sizes = tensor.at("shape").get<std::vector<int64_t>>();
  const auto extent = tensor.at("data_offsets").get<std::array<uint64_t, 2>>();
  const std::string in_file = tensor.at("dtype").get<std::string>();
  const auto known = dtype_in_file(in_file);
  const std::string dtype = about.value("dtype", "");  // if the file has its bytes
  const auto type = dtype.empty() ? known : dtype_of(dtype);
  if (!type || at::isQIntType(*type) || *type == at::ScalarType::Undefined)
    reader.fail(kHeaderAt, "tensor '", name, "' has the unknown dtype '", dtype.empty() ? in_file : dtype, "'");
  place.dtype = *type;
  const uint64_t room = head.file_bytes() - offset, element = c10::elementSize(*type);
  const auto misplaced = [&] {
    reader.fail(kHeaderAt, "tensor '", name, "' does not lie where its shape and the other tensors place it");
  };
  if (!dtype.empty()) {
    if (in_file != kBytes || place.sizes.empty() || place.sizes.back() != static_cast<int64_t>(element)) misplaced();
    place.sizes.pop_back();
  }
  place.bytes = element;
  uint64_t stride = element;  // as if no size were 0, because strides must not overflow either
  for (const int64_t size : place.sizes) {
    if (size < 0 || __builtin_mul_overflow(stride, static_cast<uint64_t>(std::max<int64_t>(size, 1)), &stride) ||
        stride > kMost)
      reader.fail(kHeaderAt, "tensor '", name, "' has an impossible shape");
    place.bytes *= static_cast<uint64_t>(size);
  }
  const uint64_t begin = offset - head.bytes.size();
  if (place.bytes > room || extent[0] != begin || extent[1] != begin + place.bytes || offset % element != 0 ||
      place.sums.size() != (place.bytes + kBlockBytes - 1) / kBlockBytes)
    misplaced();
  return place;
}

std::vector<Place> places_of(const Reader& reader, const Head& head) {
  std::vector<Place> places;
  uint64_t offset = head.bytes.size();
  for (const auto& about : head.muster.at("tensors")) {
    places.push_back(place_of(reader, head, about, offset));
    offset += places.back().bytes;
  }
  if (offset != head.file_bytes()) reader.fail(offset, "bytes that belong to no tensor");
  if (head.tensors.size() != places.size() + 1)
    reader.fail(kHeaderAt, "the header has ", head.tensors.size() - 1, " tensors, of which ", places.size(),
                " are described");
  return places;
}

// Throws if the file is shorter or longer than the `said` bytes that its header names, or if a checksum is wrong.
void verify(const Reader& reader, const std::vector<Place>& places, std::string_view bytes, uint64_t said) {
  for (const auto& place : places) {
    const auto name = place.entry.full_name();
    const uint64_t end = place.offset + place.bytes;
    if (end > bytes.size())
      reader.fail(bytes.size(), "the file ends here, within tensor '", name, "' (bytes ", place.offset, " to ", end,
                  "); it had ", said, " bytes");
    for (size_t i = 0; i < place.sums.size(); ++i) {
      const uint64_t from = place.offset + i * kBlockBytes, to = std::min(from + kBlockBytes, end);
      if (checksum(bytes.substr(from, to - from)) != place.sums[i])
        reader.fail(from, "tensor '", name, "' is not as it was written, somewhere in the ", to - from,
                    " bytes from here");
    }
  }
  if (bytes.size() > said) reader.fail(said, "the file had ", said, " bytes, and more follow");
}

at::Tensor view_of(const at::Tensor& bytes, uint64_t offset, at::ScalarType dtype, at::IntArrayRef sizes) {
  const auto count = c10::multiply_integers(sizes) * static_cast<int64_t>(c10::elementSize(dtype));
  return bytes.narrow(0, static_cast<int64_t>(offset), count).view(dtype).view(sizes);
}

UniqueFd open_file(const std::filesystem::path& path, uint64_t& bytes) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0) throw_errno(text("cannot read ", path.string()), kOlder);
  bytes = static_cast<uint64_t>(status.st_size);
  return fd;
}

// Reads up to `size` bytes; fewer if the file ends first. Returns how many.
size_t read_bytes(const UniqueFd& fd, const std::filesystem::path& path, char* to, size_t size) {
  size_t got = 0;
  while (got < size) {
    const auto more = ::read(fd.get(), to + got, size - got);
    if (more == 0) break;
    if (more > 0) {
      got += static_cast<size_t>(more);
    } else if (errno != EINTR) {
      throw_errno(text("cannot read ", path.string()), kOlder);
    }
  }
  return got;
}

}  // namespace

uint64_t checksum(std::string_view bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

void set_checksum(std::string& head) {
  if (head.size() >= kDigitsAt + kDigits) head.replace(kDigitsAt, kDigits, hexadecimal(sum_of_head(head)));
}

Shard write_container(const std::filesystem::path& path, const About& about, Entries entries) {
  // The largest elements come first, so that all are aligned without gaps, which safetensors files may not have.
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.tensor.element_size() > b.tensor.element_size(); });
  json muster = header_of(about), tensors = json::object();
  muster["tensors"] = json::array();
  uint64_t offset = 0;
  for (const auto& entry : entries) {
    const auto bytes = bytes_of(entry.tensor);
    json described{{"item", entry.item}, {"name", entry.name},   {"kind", entry.kind},
                   {"rank", entry.rank}, {"order", entry.order}, {"sums", block_sums(bytes)}};
    std::string_view dtype = name_in_file(entry.tensor.scalar_type());
    auto shape = entry.tensor.sizes().vec();
    if (dtype.empty()) {
      described["dtype"] = c10::toString(entry.tensor.scalar_type());
      dtype = kBytes;
      shape.push_back(static_cast<int64_t>(entry.tensor.element_size()));
    }
    const uint64_t end = offset + bytes.size();
    const json tensor{{"dtype", dtype}, {"shape", shape}, {"data_offsets", {offset, end}}};
    if (!tensors.emplace(entry.full_name(), tensor).second)
      throw InvalidArgument(text("a snapshot would have two tensors '", entry.full_name(), "'"), "Rename an item");
    muster["tensors"].push_back(std::move(described));
    offset = end;
  }

  muster["data_bytes"] = offset;
  const json metadata{{"format", "pt"}, {"muster", dump(muster)}};
  std::string head =
      std::string(kHeaderAt, 0) + std::string(kStart) + std::string(kDigits, '0') + "\"," + dump(metadata).substr(1);
  head += tensors.empty() ? "}" : "," + dump(tensors).substr(1);
  head.resize((head.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t length = head.size() - kHeaderAt;
  std::memcpy(head.data(), &length, kHeaderAt);
  set_checksum(head);

  AtomicFile file(path);
  file.write(head);
  for (const auto& entry : entries) file.write(bytes_of(entry.tensor));
  file.commit(true);
  return {.file = path.filename().string(), .bytes = head.size() + offset, .sum = sum_of_head(head)};
}

Container Container::read(const std::filesystem::path& path) {
  uint64_t size = 0;
  const UniqueFd fd = open_file(path, size);
  at::Tensor bytes = at::empty({static_cast<int64_t>(size)}, at::kByte);
  const size_t got = read_bytes(fd, path, static_cast<char*>(bytes.mutable_data_ptr()), size);
  if (got < size) bytes = bytes.narrow(0, 0, static_cast<int64_t>(got));
  Container container = parse(bytes_of(bytes), path.string(), true);
  container.bytes_ = bytes;
  for (size_t i = 0; i < container.entries_.size(); ++i) container.entries_[i] = container.entry_in(bytes, 0, i);
  return container;
}

Container Container::directory(std::string_view head, const std::string& name) { return parse(head, name, false); }

Container Container::parse(std::string_view bytes, const std::string& name, bool is_all) {
  const Reader reader(name);
  const Head head = reader.head(bytes);
  return reader.understood([&] {
    Container container;
    container.about_ = about_of(reader, head.muster);
    const auto places = places_of(reader, head);
    if (is_all) verify(reader, places, bytes, head.file_bytes());
    for (const auto& place : places) {
      container.extents_.push_back({place.offset, place.offset + place.bytes});
      container.entries_.push_back(place.entry);
      container.entries_.back().tensor = at::empty(place.sizes, at::TensorOptions(place.dtype).device(at::kMeta));
    }
    container.sum_ = sum_of_head(head.bytes);
    return container;
  });
}

std::string_view Container::head() const {
  return bytes_of(bytes_).substr(0, extents_.empty() ? bytes_.nbytes() : extents_[0].begin);
}

Entry Container::entry_in(const at::Tensor& bytes, uint64_t begin, size_t i) const {
  Entry entry = entries_[i];
  entry.tensor = view_of(bytes, extents_[i].begin - begin, entry.tensor.scalar_type(), entry.tensor.sizes());
  return entry;
}

About read_about(const std::filesystem::path& path) {
  const Reader reader(path.string());
  uint64_t size = 0;
  const UniqueFd fd = open_file(path, size);
  std::string bytes(kHeaderAt, 0);
  bytes.resize(read_bytes(fd, path, bytes.data(), bytes.size()));
  if (bytes.size() == kHeaderAt) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), kHeaderAt);
    bytes.resize(kHeaderAt + std::min(length, size - kHeaderAt));
    bytes.resize(kHeaderAt + read_bytes(fd, path, bytes.data() + kHeaderAt, bytes.size() - kHeaderAt));
  }
  const Head head = reader.head(bytes);
  return reader.understood([&] { return about_of(reader, head.muster); });
}

}  // namespace muster::checkpoint
