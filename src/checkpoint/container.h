// The file format of snapshots: tensors one after another, preceded by a header that describes them. Every byte of the
// file is covered by a checksum. All numbers are little-endian.
//
//     0   8  "MUSTSNAP"
//     8   4  version (2)
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
// which a bit has flipped.
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
inline constexpr uint32_t kFormatVersion = 2;
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

// Writes the file durably. Returns what a manifest needs to refer to it.
Shard write_container(const std::filesystem::path& path, const About& about, const Entries& entries);

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

  const About& about() const { return about_; }
  const Entries& entries() const { return entries_; }
  const std::vector<Extent>& extents() const { return extents_; }  // of the entries
  const at::Tensor& bytes() const { return bytes_; }               // the file; undefined if this is a directory
  std::string_view head() const;                                   // of a file that was read: up to the first tensor
  uint64_t sum() const { return sum_; }                            // of the header
  // Entry i with its values, from bytes of the file that begin at `begin`, and which it refers to.
  Entry entry_in(const at::Tensor& bytes, uint64_t begin, size_t i) const;

 private:
  About about_;
  Entries entries_;
  std::vector<Extent> extents_;
  at::Tensor bytes_;
  uint64_t sum_ = 0;
};

// Reads and verifies a file's header, without its tensors.
About read_about(const std::filesystem::path& path);

}  // namespace muster::checkpoint
