// The file format of snapshots: tensors one after another, preceded by a header that describes them. Every byte of the
// file is covered by a checksum. All numbers are little-endian.
//
//     0   8  "MUSTSNAP"
//     8   4  version (1)
//    12   4  0
//    16   8  bytes of the header, a multiple of 64
//    24   8  bytes of the file
//    32   8  checksum of the header
//    40   8  checksum of the 40 bytes before
//    48  16  0
//    64      the header: JSON, padded with blanks to a multiple of 64
//     …      the tensors in the header's order, each aligned to 64 bytes and followed by zeros up to the next
//
// Checksums are XXH3 (64 bits). A tensor has one per MiB, its padding included, so that an error can name the MiB in
// which a bit has flipped. The shared tensors come first: the other ranks need no more of a shard than that part.
//
// A reader uses nothing before it has verified its checksum, and refuses a header that does not fit the file.
//
// Errors: CorruptError names the file, the byte and, if the byte is in one, the tensor. Unavailable: the file cannot be
// read or written. Thread-safety: values, and functions without state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/entry.h"

namespace muster::checkpoint {

inline constexpr std::string_view kMagic = "MUSTSNAP";
inline constexpr uint32_t kFormatVersion = 1;
inline constexpr size_t kAlignment = 64, kPreambleBytes = 64, kBlockBytes = size_t{1} << 20;

// A file that a manifest refers to.
struct Shard {
  std::string file;  // its name in the folder
  uint64_t bytes = 0;
  uint64_t sum = 0;  // of its header, which has the checksums of everything else
};

struct About {
  int64_t steps = 0;
  int world_size = 1;
  int rank = kShared;         // of a shard
  std::vector<Shard> shards;  // of a manifest, by rank
};

uint64_t checksum(std::string_view bytes);

// Writes the file durably. `entries` must have the shared ones first. Returns what a manifest needs to refer to it.
Shard write_container(const std::filesystem::path& path, const About& about, const Entries& entries);

class Container {
 public:
  // Reads the whole file, and verifies every checksum.
  static Container read(const std::filesystem::path& path);
  // Makes one from the first bytes of a file that another rank has verified, with the entries that are complete there.
  static Container view(at::Tensor bytes, std::string name);

  const About& about() const { return about_; }
  const Entries& entries() const { return entries_; }    // views of bytes()
  const at::Tensor& bytes() const { return bytes_; }     // the file, or its first bytes
  size_t shared_bytes() const { return shared_bytes_; }  // how many of them, from the first on, all ranks need
  uint64_t sum() const { return sum_; }                  // of the header

 private:
  About about_;
  Entries entries_;
  at::Tensor bytes_;
  size_t shared_bytes_ = 0;
  uint64_t sum_ = 0;
};

// Reads and verifies a file's header, without its tensors.
About read_about(const std::filesystem::path& path);

}  // namespace muster::checkpoint
