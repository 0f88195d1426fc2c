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

// The first bytes of a file, with the file's layout.
struct Preamble {
  std::array<char, 8> magic{};
  uint32_t version = 0, zero = 0;
  uint64_t header_bytes = 0, file_bytes = 0, header_sum = 0, sum = 0;
  std::array<uint64_t, 2> zeros{};
};
static_assert(sizeof(Preamble) == kPreambleBytes && offsetof(Preamble, sum) == 40);

constexpr const char* kOlder = "The snapshot before it, if there is one, is used instead";

uint64_t sum_of(const Preamble& preamble) { return XXH3_64bits(&preamble, offsetof(Preamble, sum)); }

constexpr size_t padded(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
constexpr std::array<char, kAlignment> kZeros{};

std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// One checksum per block of `bytes` as the file holds them: with the padding.
std::vector<uint64_t> block_sums(std::string_view bytes) {
  std::vector<uint64_t> sums;
  for (size_t at = 0; at < bytes.size(); at += kBlockBytes) {
    const auto block = bytes.substr(at, kBlockBytes);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    XXH3_64bits_update(&state, block.data(), block.size());
    if (at + block.size() == bytes.size())
      XXH3_64bits_update(&state, kZeros.data(), padded(bytes.size()) - bytes.size());
    sums.push_back(XXH3_64bits_digest(&state));
  }
  return sums;
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  for (int i = 0; i < static_cast<int>(at::ScalarType::NumOptions); ++i)
    if (const auto type = static_cast<at::ScalarType>(i); name == c10::toString(type)) return type;
  return std::nullopt;
}

// Verifies the parts of a file. Its errors name the file, the byte and the problem.
class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  template <typename... Words>
  [[noreturn]] void fail(uint64_t byte, const Words&... words) const {
    throw CorruptError(text(file_, ", byte ", byte, ": ", words...), kOlder);
  }

  // `given` are the file's first bytes; there may be fewer than a preamble needs, even none.
  Preamble preamble(std::string_view given, uint64_t file_bytes) const {
    if (given.size() < kPreambleBytes) fail(given.size(), "the file ends here, within its first ", kPreambleBytes);
    Preamble preamble;
    std::memcpy(&preamble, given.data(), sizeof preamble);
    if (std::string_view(preamble.magic.data(), preamble.magic.size()) != kMagic) fail(0, "this is not a snapshot");
    if (preamble.version != kFormatVersion)
      fail(offsetof(Preamble, version), "its format is version ", preamble.version, ", and this Muster reads version ",
           kFormatVersion);
    if (preamble.sum != sum_of(preamble) || preamble.zeros != decltype(preamble.zeros){})
      fail(0, "the file's first ", kPreambleBytes, " bytes are not as they were written");
    // The checksum shows that these are the numbers that were written. Their writer may not have been Muster.
    if (preamble.header_bytes % kAlignment != 0 || preamble.header_bytes > preamble.file_bytes ||
        preamble.file_bytes - preamble.header_bytes < kPreambleBytes)
      fail(offsetof(Preamble, header_bytes), "a header of ", preamble.header_bytes,
           " bytes does not fit into a file of ", preamble.file_bytes);
    if (file_bytes < kPreambleBytes + preamble.header_bytes)
      fail(file_bytes, "the file ends here, within its header; it had ", preamble.file_bytes, " bytes");
    return preamble;
  }

  json header(const Preamble& preamble, std::string_view header) const {
    if (checksum(header) != preamble.header_sum)
      fail(kPreambleBytes, "the header (", header.size(), " bytes) is not as it was written");
    json parsed = json::parse(header, nullptr, false);
    if (!parsed.is_object()) fail(kPreambleBytes, "the header is not JSON");
    return parsed;
  }

  // Runs fn(). If fn() finds that the header's JSON lacks a field or has one of the wrong type, throws Corrupt.
  template <typename Fn>
  auto understood(Fn&& fn) const {
    try {
      return fn();
    } catch (const json::exception& error) {
      fail(kPreambleBytes, "the header lacks something: ", error.what());
    }
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
      reader.fail(kPreambleBytes, "'", shard.file, "' is not the name of a shard in this folder");
  return about;
}

json header_of(const About& about) {
  json shards = json::array();
  for (const auto& shard : about.shards)
    shards.push_back({{"file", shard.file}, {"bytes", shard.bytes}, {"sum", shard.sum}});
  return {
      {"steps", about.steps}, {"world_size", about.world_size}, {"rank", about.rank}, {"shards", std::move(shards)}};
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
Place place_of(const Reader& reader, const json& tensor, uint64_t offset, uint64_t file_bytes) {
  Place place{.entry = {.item = tensor.at("item").get<std::string>(),
                        .name = tensor.at("name").get<std::string>(),
                        .kind = tensor.at("kind").get<std::string>(),
                        .rank = tensor.at("rank").get<int>(),
                        .order = tensor.at("order").get<int64_t>()},
              .sizes = tensor.at("shape").get<std::vector<int64_t>>(),
              .offset = tensor.at("offset").get<uint64_t>(),
              .bytes = tensor.at("bytes").get<uint64_t>(),
              .sums = tensor.at("sums").get<std::vector<uint64_t>>()};
  const std::string name = place.entry.full_name(), dtype = tensor.at("dtype").get<std::string>();
  const auto type = dtype_of(dtype);
  if (!type || at::isQIntType(*type) || *type == at::ScalarType::Undefined)
    reader.fail(kPreambleBytes, "tensor '", name, "' has the unknown dtype '", dtype, "'");
  place.dtype = *type;
  const uint64_t room = file_bytes - offset;
  uint64_t bytes = c10::elementSize(*type);
  for (const int64_t size : place.sizes)
    if (size < 0 || __builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes))
      reader.fail(kPreambleBytes, "tensor '", name, "' has an impossible shape");
  if (place.offset != offset || bytes != place.bytes || bytes > room || padded(bytes) > room ||
      place.sums.size() != (bytes + kBlockBytes - 1) / kBlockBytes)
    reader.fail(kPreambleBytes, "tensor '", name, "' does not lie where its shape and the other tensors place it");
  return place;
}

std::vector<Place> places_of(const Reader& reader, const json& header, const Preamble& preamble) {
  std::vector<Place> places;
  uint64_t offset = kPreambleBytes + preamble.header_bytes;
  for (const auto& tensor : header.at("tensors")) {
    places.push_back(place_of(reader, tensor, offset, preamble.file_bytes));
    offset += padded(places.back().bytes);
  }
  if (offset != preamble.file_bytes) reader.fail(offset, "bytes that belong to no tensor");
  return places;
}

// Throws if the file is shorter or longer than the `said` bytes that its preamble names, or if a checksum is wrong.
void verify(const Reader& reader, const std::vector<Place>& places, std::string_view bytes, uint64_t said) {
  for (const auto& place : places) {
    const auto name = place.entry.full_name();
    const uint64_t end = place.offset + padded(place.bytes);
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

Shard write_container(const std::filesystem::path& path, const About& about, const Entries& entries) {
  json header = header_of(about);
  const auto describe = [&](uint64_t begin) {
    json tensors = json::array();
    uint64_t offset = begin;
    for (const auto& entry : entries) {
      const auto bytes = bytes_of(entry.tensor);
      tensors.push_back({{"item", entry.item},
                         {"name", entry.name},
                         {"kind", entry.kind},
                         {"rank", entry.rank},
                         {"order", entry.order},
                         {"dtype", c10::toString(entry.tensor.scalar_type())},
                         {"shape", entry.tensor.sizes().vec()},
                         {"offset", offset},
                         {"bytes", bytes.size()}});
      offset += padded(bytes.size());
    }
    return std::pair(std::move(tensors), offset);
  };
  std::vector<std::vector<uint64_t>> sums;
  sums.reserve(entries.size());
  for (const auto& entry : entries) sums.push_back(block_sums(bytes_of(entry.tensor)));

  uint64_t begin = kPreambleBytes, end = 0;
  std::string written;
  do {
    auto [tensors, file_bytes] = describe(begin);
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i]["sums"] = sums[i];
    header["tensors"] = std::move(tensors);
    written = dump(header);
    end = file_bytes;
    // The header's length decides the tensors' offsets, and the digits of these decide the header's length. Two or
    // three rounds settle both.
    const uint64_t needed = kPreambleBytes + padded(written.size());
    if (needed <= begin) break;
    begin = needed;
  } while (true);
  written.resize(begin - kPreambleBytes, ' ');

  Preamble preamble{
      .version = kFormatVersion, .header_bytes = written.size(), .file_bytes = end, .header_sum = checksum(written)};
  std::copy(kMagic.begin(), kMagic.end(), preamble.magic.begin());
  preamble.sum = sum_of(preamble);

  AtomicFile file(path);
  file.write({reinterpret_cast<const char*>(&preamble), sizeof preamble});
  file.write(written);
  for (const auto& entry : entries) {
    const auto bytes = bytes_of(entry.tensor);
    file.write(bytes);
    file.write({kZeros.data(), padded(bytes.size()) - bytes.size()});
  }
  file.commit(true);
  return {.file = path.filename().string(), .bytes = end, .sum = preamble.header_sum};
}

Container Container::read(const std::filesystem::path& path) {
  const Reader reader(path.string());
  uint64_t size = 0;
  const UniqueFd fd = open_file(path, size);
  Container container;
  container.bytes_ = at::empty({static_cast<int64_t>(size)}, at::kByte);
  const size_t got = read_bytes(fd, path, static_cast<char*>(container.bytes_.mutable_data_ptr()), size);
  if (got < size) container.bytes_ = container.bytes_.narrow(0, 0, static_cast<int64_t>(got));
  const auto bytes = bytes_of(container.bytes_);

  const Preamble preamble = reader.preamble(bytes, bytes.size());
  const json header = reader.header(preamble, bytes.substr(kPreambleBytes, preamble.header_bytes));
  const auto places = reader.understood([&] {
    container.about_ = about_of(reader, header);
    return places_of(reader, header, preamble);
  });
  verify(reader, places, bytes, preamble.file_bytes);
  for (const auto& place : places) {
    container.extents_.push_back({place.offset, place.offset + padded(place.bytes)});
    container.entries_.push_back(place.entry);
    container.entries_.back().tensor = view_of(container.bytes_, place.offset, place.dtype, place.sizes);
  }
  container.sum_ = preamble.header_sum;
  return container;
}

Container Container::directory(std::string_view head, const std::string& name) {
  const Reader reader(name);
  Container container;
  const Preamble preamble = reader.preamble(head, head.size());
  const json header = reader.header(preamble, head.substr(kPreambleBytes, preamble.header_bytes));
  reader.understood([&] {
    container.about_ = about_of(reader, header);
    for (const auto& place : places_of(reader, header, preamble)) {
      container.extents_.push_back({place.offset, place.offset + padded(place.bytes)});
      container.entries_.push_back(place.entry);
      container.entries_.back().tensor = at::empty(place.sizes, at::TensorOptions(place.dtype).device(at::kMeta));
    }
  });
  container.sum_ = preamble.header_sum;
  return container;
}

std::string_view Container::head() const {
  const uint64_t begin = extents_.empty() ? bytes_.nbytes() : extents_[0].begin;
  return bytes_of(bytes_).substr(0, begin);
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
  std::string bytes(kPreambleBytes, 0);
  bytes.resize(read_bytes(fd, path, bytes.data(), bytes.size()));
  const Preamble preamble = reader.preamble(bytes, size);
  bytes.resize(preamble.header_bytes);
  bytes.resize(read_bytes(fd, path, bytes.data(), bytes.size()));
  const json header = reader.header(preamble, bytes);
  return reader.understood([&] { return about_of(reader, header); });
}

}  // namespace muster::checkpoint
