#include "checkpoint/container.h"

#include <ATen/ops/empty.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/atomic_file.h"
#include "base/fd.h"
#include "base/hash.h"
#include "checkpoint/tensor_header.h"
#include "muster/base/error.h"

namespace muster::checkpoint {
namespace {

using nlohmann::json;

// How every header begins; 16 hexadecimal digits follow.
constexpr std::string_view kStart = R"({"__metadata__":{"checksum":")";
constexpr size_t kDigits = 16, kDigitsAt = kHeaderAt + kStart.size();
constexpr const char* kOlder = "The snapshot before it, if there is one, is used instead";

uint64_t blocks_in(uint64_t bytes) { return (bytes + kBlockBytes - 1) / kBlockBytes; }

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

// What precedes the tensors.
struct Head {
  std::string_view bytes;             // of the file
  std::vector<StoredTensor> tensors;  // in the file's order
  json muster;                        // Muster's part of the metadata
  uint64_t data_bytes = 0;            // of the tensors
  uint64_t file_bytes() const { return bytes.size() + data_bytes; }
};

// `given` are the file's first bytes; there may be fewer than a head needs, even none.
Head read_head(std::string_view given, const FileErrors& errors) {
  if (given.size() > kHeaderAt && given.substr(kHeaderAt, kStart.size()) != kStart.substr(0, given.size() - kHeaderAt))
    errors.fail(kHeaderAt, "this is not a snapshot");
  Head head{.bytes = head_in(given, errors)};
  if (head.bytes.size() < kDigitsAt + kDigits ||
      head.bytes.substr(kDigitsAt, kDigits) != hexadecimal(sum_of_head(head.bytes)))
    errors.fail(0, "the header (", head.bytes.size() - kHeaderAt, " bytes) is not as it was written");
  // The checksum shows that this was written. Its writer may not have been Muster.
  const json header = parsed_header(head.bytes, errors);
  errors.understood([&] {
    head.muster = json::parse(header.at("__metadata__").at("muster").get<std::string>(), nullptr, false);
    if (!head.muster.is_object()) errors.fail(kHeaderAt, "the header's part \"muster\" is not JSON");
    if (const auto version = head.muster.at("version").get<int64_t>(); version != kFormatVersion)
      errors.fail<Unavailable>(kHeaderAt, "its format is version ", version, ", and this Muster reads version ",
                               kFormatVersion);
    head.data_bytes = head.muster.at("data_bytes").get<uint64_t>();
    if (head.data_bytes > kMostBytes)
      errors.fail(kHeaderAt, head.data_bytes, " bytes of tensors do not fit into a file");
    head.tensors = stored_tensors(header, head.data_bytes, errors);
  });
  return head;
}

About about_of(const json& header, const FileErrors& errors) {
  About about{.steps = header.at("steps").get<int64_t>(),
              .world_size = header.at("world_size").get<int>(),
              .rank = header.at("rank").get<int>()};
  for (const auto& shard : header.at("shards"))
    about.shards.push_back(
        {shard.at("file").get<std::string>(), shard.at("bytes").get<uint64_t>(), shard.at("sum").get<uint64_t>()});
  if (const auto score = header.find("score"); score != header.end()) about.score = score->get<double>();
  about.training = header.value("training", std::string());
  for (const auto& shard : about.shards)  // a manifest from an untrusted source must not refer to other folders
    if (shard.file.empty() || shard.file.front() == '.' || shard.file.find('/') != std::string::npos)
      errors.fail(kHeaderAt, "'", shard.file, "' is not the name of a shard in this folder");
  return about;
}

json header_of(const About& about) {
  json shards = json::array();
  for (const auto& shard : about.shards)
    shards.push_back({{"file", shard.file}, {"bytes", shard.bytes}, {"sum", shard.sum}});
  json header{{"version", kFormatVersion},
              {"steps", about.steps},
              {"world_size", about.world_size},
              {"rank", about.rank},
              {"shards", std::move(shards)}};
  if (about.score) header["score"] = *about.score;
  if (!about.training.empty()) header["training"] = about.training;
  return header;
}

// An entry and where it lies in the file.
struct Place {
  Entry entry;
  at::ScalarType dtype = at::kByte;
  std::vector<int64_t> sizes;
  uint64_t begin = 0, end = 0;
  std::vector<uint64_t> sums;
};

// From what the metadata says about a tensor, and the header, from whose tensors it is taken. So that every byte has a
// checksum, this one has to begin at `begin`.
Place place_of(const json& about, std::map<std::string_view, const StoredTensor*>& tensors, uint64_t begin,
               const Head& head, const FileErrors& errors) {
  Place place{.entry = {.item = about.at("item").get<std::string>(),
                        .name = about.at("name").get<std::string>(),
                        .kind = about.at("kind").get<std::string>(),
                        .rank = about.at("rank").get<int>(),
                        .order = about.at("order").get<int64_t>()},
              .sums = about.at("sums").get<std::vector<uint64_t>>()};
  const std::string name = place.entry.full_name();
  const std::string key = about.value("key", name);  // if another entry has the name
  const auto found = tensors.find(key);
  if (found == tensors.end()) errors.fail(kHeaderAt, "the header lacks something: tensor '", name, "'");
  const StoredTensor& stored = *found->second;
  tensors.erase(found);
  place.dtype = stored.dtype;
  place.sizes = stored.sizes;
  place.begin = head.bytes.size() + stored.begin;
  place.end = head.bytes.size() + stored.end;
  const auto dtype = about.value("dtype", "");  // if the file has the bytes of its elements
  if (!dtype.empty()) {
    const auto type = dtype_of(dtype);
    if (!type || at::isQIntType(*type) || *type == at::ScalarType::Undefined)
      errors.fail(kHeaderAt, "tensor '", name, "' has the unknown dtype '", dtype, "'");
    place.dtype = *type;
    if (stored.dtype != at::kByte || place.sizes.empty() ||
        place.sizes.back() != static_cast<int64_t>(c10::elementSize(*type)))
      errors.fail(kHeaderAt, "tensor '", name, "' does not have the bytes of dtype '", dtype, "'");
    place.sizes.pop_back();
  }
  if (place.dtype == at::ScalarType::Undefined)
    errors.fail(kHeaderAt, "tensor '", name, "' has the unknown dtype '", stored.dtype_in_file, "'");
  if (place.begin != begin || place.begin % c10::elementSize(place.dtype) != 0 ||
      place.sums.size() != blocks_in(place.end - place.begin))
    errors.fail(kHeaderAt, "tensor '", name, "' does not lie where the metadata place it");
  return place;
}

std::vector<Place> places_of(const Head& head, const FileErrors& errors) {
  std::map<std::string_view, const StoredTensor*> tensors;
  for (const StoredTensor& tensor : head.tensors) tensors[tensor.name] = &tensor;
  std::vector<Place> places;
  uint64_t end = head.bytes.size();
  for (const auto& about : head.muster.at("tensors")) {
    places.push_back(place_of(about, tensors, end, head, errors));
    end = places.back().end;
    // So a part of the file that begins with a tensor has all of its tensors aligned.
    if (places.size() > 1 && c10::elementSize(places.back().dtype) > c10::elementSize(places[places.size() - 2].dtype))
      errors.fail(kHeaderAt, "tensor '", places.back().entry.full_name(),
                  "' has larger elements than the one before it");
  }
  if (!tensors.empty())
    errors.fail(kHeaderAt, "the header has ", head.tensors.size(), " tensors, of which ", places.size(),
                " are described");
  return places;
}

// Throws unless the file has the bytes that its header names.
void check_length(const std::vector<Place>& places, uint64_t has, uint64_t had, const FileErrors& errors) {
  if (has > had) errors.fail(had, "the file had ", had, " bytes, and more follow");
  for (const auto& place : places)
    if (place.end > has)
      errors.fail(has, "the file ends here, within tensor '", place.entry.full_name(), "' (bytes ", place.begin, " to ",
                  place.end, "); it had ", had, " bytes");
}

// Reads up to `size` bytes from byte `at` on; fewer if the file ends first. Returns how many.
size_t read_bytes(const UniqueFd& fd, const std::string& name, uint64_t at, char* to, size_t size) {
  size_t got = 0;
  while (got < size) {
    const auto more = ::pread(fd.get(), to + got, size - got, static_cast<off_t>(at + got));
    if (more == 0) break;
    if (more > 0) {
      got += static_cast<size_t>(more);
    } else if (errno != EINTR) {
      throw_errno(text("cannot read ", name), kOlder);
    }
  }
  return got;
}

Container::Identity identity_of(const UniqueFd& fd) {
  struct stat status {};
  return ::fstat(fd.get(), &status) == 0 ? Container::Identity{status.st_dev, status.st_ino} : Container::Identity{};
}

// A file's first bytes, up to the tensors if it is a container.
std::string head_of_file(const UniqueFd& fd, const std::string& name, uint64_t size) {
  std::string bytes(kHeaderAt, 0);
  bytes.resize(read_bytes(fd, name, 0, bytes.data(), bytes.size()));
  if (bytes.size() == kHeaderAt) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), kHeaderAt);
    bytes.resize(kHeaderAt + std::min({length, size - std::min<uint64_t>(size, kHeaderAt), kMostHeaderBytes}));
    bytes.resize(kHeaderAt + read_bytes(fd, name, kHeaderAt, bytes.data() + kHeaderAt, bytes.size() - kHeaderAt));
  }
  return bytes;
}

}  // namespace

uint64_t checksum(std::string_view bytes) { return hash_of_bytes(bytes.data(), bytes.size()); }

void set_checksum(std::string& head) {
  if (head.size() >= kDigitsAt + kDigits) head.replace(kDigitsAt, kDigits, hexadecimal(sum_of_head(head)));
}

void put_in_files_order(Entries& entries) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return comes_first(a.tensor, b.tensor); });
}

Shard write_container(const std::filesystem::path& path, const About& about, Entries entries, const Fetch& fetch) {
  put_in_files_order(entries);
  json muster = header_of(about), tensors = json::object();
  muster["tensors"] = json::array();
  uint64_t data_bytes = 0;
  for (const auto& entry : entries) {
    constexpr uint64_t kWidest = ~uint64_t{0};  // a checksum with as many digits as any
    json described{{"item", entry.item},   {"name", entry.name},
                   {"kind", entry.kind},   {"rank", entry.rank},
                   {"order", entry.order}, {"sums", std::vector<uint64_t>(blocks_in(entry.tensor.nbytes()), kWidest)}};
    if (!has_name_in_files(entry.tensor.scalar_type())) described["dtype"] = c10::toString(entry.tensor.scalar_type());
    std::string key = entry.full_name();
    if (tensors.contains(key) || key == "__metadata__") {
      key += text("#", tensors.size());
      described["key"] = key;
    }
    if (!tensors.emplace(key, description_of(entry.tensor, data_bytes)).second)
      throw InvalidArgument(text("a snapshot would have two tensors '", key, "'"), "Rename an item");
    muster["tensors"].push_back(std::move(described));
    data_bytes += entry.tensor.nbytes();
  }
  muster["data_bytes"] = data_bytes;
  const auto head_of_at_least = [&](size_t bytes) {
    const json metadata{{"format", "pt"}, {"muster", dump(muster)}};
    std::string header = std::string(kStart) + std::string(kDigits, '0') + "\"," + dump(metadata).substr(1);
    header += tensors.empty() ? "}" : "," + dump(tensors).substr(1);
    return head_from(std::move(header), bytes);
  };

  // The head comes first in the file and is written last, so that each block is hashed when it is written.
  const size_t head_bytes = head_of_at_least(0).size();
  AtomicFile file(path, head_bytes);
  file.reserve(head_bytes + data_bytes);
  for (size_t i = 0; i < entries.size(); ++i) {
    std::vector<uint64_t> sums;
    const auto write = [&](std::string_view bytes) {
      for (size_t at = 0; at < bytes.size(); at += kBlockBytes) {
        const auto block = bytes.substr(at, kBlockBytes);
        sums.push_back(checksum(block));
        file.write(block);
      }
    };
    if (entries[i].tensor.is_meta())
      fetch(entries[i], write);
    else
      write(bytes_of(entries[i].tensor));
    muster["tensors"][i]["sums"] = std::move(sums);
  }
  std::string head = head_of_at_least(head_bytes);
  set_checksum(head);
  file.write_front(head);
  file.commit(true);
  return {.file = path.filename().string(), .bytes = head.size() + data_bytes, .sum = sum_of_head(head)};
}

Container Container::open(const std::filesystem::path& path) {
  uint64_t size = 0;
  auto fd = std::make_shared<UniqueFd>(open_to_read(path, kOlder, size));
  Container container = parse(head_of_file(*fd, path.string(), size), path.string(), size);
  container.identity_ = identity_of(*fd);
  container.fd_ = std::move(fd);
  return container;
}

std::shared_ptr<UniqueFd> Container::file() const {
  if (fd_) return fd_;
  uint64_t size = 0;
  auto fd = std::make_shared<UniqueFd>(open_to_read(name_, kOlder, size));
  if (identity_of(*fd) != identity_ || size != bytes_)
    throw CorruptError(text(name_, ", byte 0: this is not the file that was here before"), kOlder);
  return fd;
}

Container Container::directory(std::string_view head, const std::string& name) {
  return parse(head, name, std::nullopt);
}

Container Container::parse(std::string_view bytes, const std::string& name, std::optional<uint64_t> file_bytes) {
  const FileErrors errors(name, kOlder);
  const Head head = read_head(bytes, errors);
  return errors.understood([&] {
    Container container;
    container.name_ = name;
    container.head_ = head.bytes;
    container.bytes_ = head.file_bytes();
    container.sum_ = sum_of_head(head.bytes);
    container.about_ = about_of(head.muster, errors);
    const auto places = places_of(head, errors);
    if (file_bytes) check_length(places, *file_bytes, head.file_bytes(), errors);
    for (const auto& place : places) {
      for (size_t i = 0; i < place.sums.size(); ++i)
        container.blocks_.push_back({place.begin + i * kBlockBytes, place.sums[i], container.entries_.size()});
      container.extents_.push_back({place.begin, place.end});
      container.entries_.push_back(place.entry);
      container.entries_.back().tensor = at::empty(place.sizes, at::TensorOptions(place.dtype).device(at::kMeta));
    }
    return container;
  });
}

size_t Container::block_at(uint64_t begin) const {
  const auto found = std::lower_bound(blocks_.begin(), blocks_.end(), begin,
                                      [](const Block& block, uint64_t at) { return block.begin < at; });
  return static_cast<size_t>(found - blocks_.begin());
}

uint64_t Container::end_of(size_t block) const {
  return block + 1 < blocks_.size() ? blocks_[block + 1].begin : bytes_;
}

// To nowhere if `to` is null.
void Container::read_blocks(size_t first, size_t last, char* to) const {
  const FileErrors errors(name_, kOlder);
  const auto fd = file();
  const auto scratch = to ? nullptr : std::make_unique_for_overwrite<char[]>(kBlockBytes);
  for (size_t next = first; first < last; first = next) {
    while (next < last && end_of(next) - blocks_[first].begin <= kBlockBytes) ++next;
    const uint64_t begin = blocks_[first].begin, bytes = end_of(next - 1) - begin;
    char* const here = to ? to : scratch.get();
    const size_t got = read_bytes(*fd, name_, begin, here, bytes);
    for (size_t i = first; i < next; ++i) {
      const uint64_t from = blocks_[i].begin, end = end_of(i);
      const auto name = [&] { return entries_[blocks_[i].entry].full_name(); };
      if (end > begin + got)
        errors.fail(begin + got, "the file ends here, within tensor '", name(), "'; it had ", bytes_, " bytes");
      if (checksum({here + (from - begin), end - from}) != blocks_[i].sum)
        errors.fail(from, "tensor '", name(), "' is not as it was written, somewhere in the ", end - from,
                    " bytes from here");
    }
    if (to) to += bytes;
  }
}

void Container::read(size_t first, size_t last, void* to) const {
  if (first < last)
    read_blocks(block_at(extents_[first].begin), block_at(extents_[last - 1].end), static_cast<char*>(to));
}

Entry Container::read(size_t i) const {
  Entry entry = entries_[i];
  entry.tensor = at::empty(entry.tensor.sizes(), entry.tensor.scalar_type());
  read(i, i + 1, entry.tensor.mutable_data_ptr());
  return entry;
}

void Container::verify(uint64_t part, uint64_t parts) const {
  const auto begin_of = [&](uint64_t i) {
    return i == parts ? blocks_.size() : block_at(head_.size() + (bytes_ - head_.size()) / parts * i);
  };
  read_blocks(begin_of(part), begin_of(part + 1), nullptr);
}

Entry Container::entry_in(const at::Tensor& bytes, size_t first, size_t i) const {
  Entry entry = entries_[i];
  entry.tensor =
      view_of(bytes, extents_[i].begin - extents_[first].begin, entry.tensor.scalar_type(), entry.tensor.sizes());
  return entry;
}

About read_about(const std::filesystem::path& path) {
  uint64_t size = 0;
  const UniqueFd fd = open_to_read(path, kOlder, size);
  const std::string bytes = head_of_file(fd, path.string(), size);
  const FileErrors errors(path.string(), kOlder);
  const Head head = read_head(bytes, errors);
  return errors.understood([&] { return about_of(head.muster, errors); });
}

}  // namespace muster::checkpoint
