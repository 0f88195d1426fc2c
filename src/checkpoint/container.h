// The file format of snapshots: a safetensors file, in which everything that a snapshot needs beyond names, dtypes and
// shapes is part of the metadata. Every byte is covered by a checksum.
//
//     0   8  bytes of the header, little-endian
//     8      the header: {"__metadata__":{"checksum":"0123456789abcdef","format":"pt","muster":"…"},
//                         "model/a.weight":{"data_offsets":[0,4800],"dtype":"F32","shape":[…]}, …}, and blanks up to a
//            multiple of 64 bytes of the file
//     …      the tensors, without gaps; those with the largest elements first, so that all are aligned
//
// "muster" is JSON in a string: version (2), steps, world_size, rank, shards, perhaps score, data_bytes, and tensors, which has for each
// tensor in the file's order: item, name, kind, rank, order, its checksums; its key in the header, if that is not its full
// name, because another has it; and its dtype, if safetensors files have none like it. Such a tensor is stored as the bytes
// of its elements, in one more dimension.
//
// Checksums are XXH3 (64 bits). A tensor has one per MiB, so that an error can name the MiB in which a bit has flipped.
// "checksum" is that of the first 8 bytes and the header, with zeros in its own place.
//
// A reader uses nothing before it has verified its checksum, and refuses a header that does not fit the file.
//
// Errors: CorruptError names the file, the byte and, if the byte is in one, the tensor. Unavailable: the file cannot be
// read or written. Thread-safety: values, and functions without state.
// Source: the format of Hugging Face's safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/entry.h"

namespace muster::checkpoint {

inline constexpr int64_t kFormatVersion = 2;
inline constexpr size_t kBlockBytes = size_t{1} << 20;  // of a tensor, with a checksum of their own

// A file that a manifest refers to.
struct Shard {
  std::string file;  // its name in the folder
  uint64_t bytes = 0;
  uint64_t sum = 0;  // of its header, which has the checksums of everything else
};

struct About {
  int64_t steps = 0;
  int world_size = 1;
  int rank = kShared;                // of a shard
  std::vector<Shard> shards;         // of a manifest, by rank
  std::optional<double> score = {};  // of the snapshot; not of a shard
};

uint64_t checksum(std::string_view bytes);

// Writes the file durably. Returns what a manifest needs to refer to it. InvalidArgument: a name is
// not UTF-8.
Shard write_container(const std::filesystem::path& path, const About& about, Entries entries);
// Makes a head's checksum right. For tests that forge files.
void set_checksum(std::string& head);

class Container {
 public:
  // Where an entry lies in the file. The next one begins at its end.
  struct Extent {
    uint64_t begin = 0, end = 0;
  };

  // Reads the whole file, and verifies every checksum.
  static Container read(const std::filesystem::path& path);
  // From the head() of a file that another rank has verified. The entries' tensors have no values: they are on the device
  // "meta". `name`: for messages.
  static Container directory(std::string_view head, const std::string& name);
  // The same from a file. Reads and verifies its header, and compares its length.
  static Container outline(const std::filesystem::path& path);

  const About& about() const { return about_; }
  const Entries& entries() const { return entries_; }
  const std::vector<Extent>& extents() const { return extents_; }  // of the entries
  const at::Tensor& bytes() const { return bytes_; }               // the file; undefined if this is a directory
  std::string_view head() const;                                   // of a file that was read: up to the first tensor
  uint64_t sum() const { return sum_; }                            // of the header
  // Entry i with its values, from bytes of the file that begin at `begin`, and which it refers to.
  Entry entry_in(const at::Tensor& bytes, uint64_t begin, size_t i) const;

 private:
  static Container parse(std::string_view bytes, const std::string& name, bool is_all);

  About about_;
  Entries entries_;
  std::vector<Extent> extents_;
  at::Tensor bytes_;
  uint64_t sum_ = 0;
};

// Reads and verifies a file's header, without its tensors.
About read_about(const std::filesystem::path& path);

}  // namespace muster::checkpoint
