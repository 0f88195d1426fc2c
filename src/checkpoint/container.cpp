#include "checkpoint/container.h"

#include <ATen/ops/empty.h>
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
      errors.fail(kHeaderAt, "its format is version ", version, ", and this Muster reads version ", kFormatVersion);
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
      place.sums.size() != (place.end - place.begin + kBlockBytes - 1) / kBlockBytes)
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

// Throws if the file is shorter or longer than the `said` bytes that its header names, or if a checksum is wrong.
void verify(const std::vector<Place>& places, std::string_view bytes, uint64_t said, const FileErrors& errors) {
  for (const auto& place : places) {
    const auto name = place.entry.full_name();
    if (place.end > bytes.size())
      errors.fail(bytes.size(), "the file ends here, within tensor '", name, "' (bytes ", place.begin, " to ",
                  place.end, "); it had ", said, " bytes");
    for (size_t i = 0; i < place.sums.size(); ++i) {
      const uint64_t from = place.begin + i * kBlockBytes, to = std::min(from + kBlockBytes, place.end);
      if (checksum(bytes.substr(from, to - from)) != place.sums[i])
        errors.fail(from, "tensor '", name, "' is not as it was written, somewhere in the ", to - from,
                    " bytes from here");
    }
  }
  if (bytes.size() > said) errors.fail(said, "the file had ", said, " bytes, and more follow");
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

// A file's first bytes, up to the tensors if it is a container.
std::string head_of_file(const std::filesystem::path& path, uint64_t& size) {
  const UniqueFd fd = open_to_read(path, kOlder, size);
  std::string bytes(kHeaderAt, 0);
  bytes.resize(read_bytes(fd, path, bytes.data(), bytes.size()));
  if (bytes.size() == kHeaderAt) {
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), kHeaderAt);
    bytes.resize(kHeaderAt + std::min({length, size - kHeaderAt, kMostHeaderBytes}));
    bytes.resize(kHeaderAt + read_bytes(fd, path, bytes.data() + kHeaderAt, bytes.size() - kHeaderAt));
  }
  return bytes;
}

}  // namespace

uint64_t checksum(std::string_view bytes) { return hash_of_bytes(bytes.data(), bytes.size()); }

void set_checksum(std::string& head) {
  if (head.size() >= kDigitsAt + kDigits) head.replace(kDigitsAt, kDigits, hexadecimal(sum_of_head(head)));
}

Shard write_container(const std::filesystem::path& path, const About& about, Entries entries) {
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return comes_first(a.tensor, b.tensor); });
  json muster = header_of(about), tensors = json::object();
  muster["tensors"] = json::array();
  uint64_t offset = 0;
  for (const auto& entry : entries) {
    const auto bytes = bytes_of(entry.tensor);
    json described{{"item", entry.item}, {"name", entry.name},   {"kind", entry.kind},
                   {"rank", entry.rank}, {"order", entry.order}, {"sums", block_sums(bytes)}};
    if (!has_name_in_files(entry.tensor.scalar_type())) described["dtype"] = c10::toString(entry.tensor.scalar_type());
    std::string key = entry.full_name();
    if (tensors.contains(key) || key == "__metadata__") {
      key += text("#", tensors.size());
      described["key"] = key;
    }
    if (!tensors.emplace(key, description_of(entry.tensor, offset)).second)
      throw InvalidArgument(text("a snapshot would have two tensors '", key, "'"), "Rename an item");
    muster["tensors"].push_back(std::move(described));
    offset += bytes.size();
  }

  muster["data_bytes"] = offset;
  const json metadata{{"format", "pt"}, {"muster", dump(muster)}};
  std::string header = std::string(kStart) + std::string(kDigits, '0') + "\"," + dump(metadata).substr(1);
  header += tensors.empty() ? "}" : "," + dump(tensors).substr(1);
  std::string head = head_from(std::move(header));
  set_checksum(head);

  AtomicFile file(path);
  file.write(head);
  for (const auto& entry : entries) file.write(bytes_of(entry.tensor));
  file.commit(true);
  return {.file = path.filename().string(), .bytes = head.size() + offset, .sum = sum_of_head(head)};
}

Container Container::read(const std::filesystem::path& path) {
  uint64_t size = 0;
  const UniqueFd fd = open_to_read(path, kOlder, size);
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
  const FileErrors errors(name, kOlder);
  const Head head = read_head(bytes, errors);
  return errors.understood([&] {
    Container container;
    container.about_ = about_of(head.muster, errors);
    const auto places = places_of(head, errors);
    if (is_all) verify(places, bytes, head.file_bytes(), errors);
    for (const auto& place : places) {
      container.extents_.push_back({place.begin, place.end});
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

Container Container::outline(const std::filesystem::path& path) {
  uint64_t size = 0;
  const std::string head = head_of_file(path, size);
  const FileErrors errors(path.string(), kOlder);
  if (const uint64_t said = read_head(head, errors).file_bytes(); size != said)
    errors.fail(std::min(size, said), "the file has ", size, " bytes, and had ", said);
  return directory(head, path.string());
}

About read_about(const std::filesystem::path& path) {
  uint64_t size = 0;
  const std::string bytes = head_of_file(path, size);
  const FileErrors errors(path.string(), kOlder);
  const Head head = read_head(bytes, errors);
  return errors.understood([&] { return about_of(head.muster, errors); });
}

}  // namespace muster::checkpoint
