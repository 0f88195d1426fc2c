// The file format of snapshots: a safetensors file, in which everything that a snapshot needs beyond names, dtypes and
// shapes is part of the metadata. Every byte is covered by a checksum.
//
//     0   8  bytes of the header, little-endian
//     8      the header: {"__metadata__":{"checksum":"0123456789abcdef","format":"pt","muster":"…"},
//                         "model/a.weight":{"data_offsets":[0,4800],"dtype":"F32","shape":[…]}, …}, and blanks up to a
//            multiple of 64 bytes of the file
//     …      the tensors, without gaps; those with the largest elements first, so that all are aligned
//
// "muster" is JSON in a string: version (2), steps, world_size, rank, shards, perhaps score and training, data_bytes,
// and tensors, which has for each tensor in the file's order: item, name, kind, rank, order, its checksums; its key in
// the header, if that is not its full name, because another has it; and its dtype, if safetensors files have none like
// it. Such a tensor is stored as the bytes of its elements, in one more dimension.
//
// Checksums are XXH3 (64 bits). A tensor has one per MiB, so that an error can name the MiB in which a bit has flipped.
// "checksum" is that of the first 8 bytes and the header, with zeros in its own place.
//
// A reader uses nothing before it has verified its checksum, and refuses a header that does not fit the file. It takes
// a tensor's bytes from the file to where they are needed, a MiB at a time, and verifies each while it is in the cache.
// It does not map the file: a disk that fails, or another program that shortens the file, would end the process.
//
// Errors: CorruptError names the file, the byte and, if the byte is in one, the tensor. Unavailable: the file cannot be
// read or written. Thread-safety: values, and functions without state.
// Source: the format of Hugging Face's safetensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
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
  std::string training = {};         // the same; empty: not said
};

uint64_t checksum(std::string_view bytes);

// Passes on the bytes of an entry that are not here (its tensor is on the device "meta"), in order, in pieces of several
// kBlockBytes each but for the last one.
using Fetch = std::function<void(const Entry& entry, const std::function<void(std::string_view piece)>& take)>;

// Puts entries in the order of the file.
void put_in_files_order(Entries& entries);
// Writes the file durably. Returns what a manifest needs to refer to it. InvalidArgument: a name is
// not UTF-8.
Shard write_container(const std::filesystem::path& path, const About& about, Entries entries,
                      const Fetch& fetch = nullptr);
// Makes a head's checksum right. For tests that forge files.
void set_checksum(std::string& head);

// What is in a file, and how to read it.
class Container {
 public:
  // Where an entry lies in the file. The next one begins at its end.
  struct Extent {
    uint64_t begin = 0, end = 0;
  };

  // Opens the file, verifies its header, and compares its length. The entries' tensors are on the device "meta".
  static Container open(const std::filesystem::path& path);
  // The same from the head() of a file that another rank has opened. `name`: for messages.
  static Container directory(std::string_view head, const std::string& name);

  const About& about() const { return about_; }
  const Entries& entries() const { return entries_; }
  const std::vector<Extent>& extents() const { return extents_; }  // of the entries
  const std::string& head() const { return head_; }                // the file up to the first tensor
  uint64_t bytes() const { return bytes_; }                        // of the file
  uint64_t sum() const { return sum_; }                            // of the header
  // Which file it is, if this process has opened it; otherwise 0.
  struct Identity {
    uint64_t device = 0, inode = 0;
    friend bool operator==(const Identity&, const Identity&) = default;
  };
  const Identity& identity() const { return identity_; }
  bool is_open() const { return identity_.inode != 0; }
  // Of many files only some may be open at a time: each read opens it again. CorruptError if it is another one then.
  void open_for_each_read() { fd_.reset(); }

  // Of a file that was opened: reads the entries from `first` to before `last`, which lie in one piece, into the memory
  // at `to`. CorruptError if a checksum is wrong; what is in the memory then is not said.
  void read(size_t first, size_t last, void* to) const;
  Entry read(size_t i) const;  // one entry with its values, in memory of their own
  // Verifies one of `parts` parts of it, which have about as many bytes.
  void verify(uint64_t part = 0, uint64_t parts = 1) const;
  // Entry i with its values, from `bytes` of the file that begin with entry `first`, and which it refers to.
  Entry entry_in(const at::Tensor& bytes, size_t first, size_t i) const;

 private:
  struct Block {
    uint64_t begin = 0, sum = 0;
    size_t entry = 0;
  };

  static Container parse(std::string_view bytes, const std::string& name, std::optional<uint64_t> file_bytes);
  std::shared_ptr<UniqueFd> file() const;
  void read_blocks(size_t first, size_t last, char* to) const;
  size_t block_at(uint64_t begin) const;  // the first that begins there or later
  uint64_t end_of(size_t block) const;

  std::string name_, head_;
  About about_;
  Entries entries_;
  std::vector<Extent> extents_;
  std::vector<Block> blocks_;
  uint64_t bytes_ = 0, sum_ = 0;
  Identity identity_;
  std::shared_ptr<UniqueFd> fd_;  // null: see open_for_each_read()
};

// Reads and verifies a file's header, without its tensors.
About read_about(const std::filesystem::path& path);

}  // namespace muster::checkpoint
