// Memory shared between processes, without names: memfds (memfd_create(2)) and their mappings.
//
// A memfd has no path: nothing to leak, nothing to guess, no limit of /dev/shm; the kernel frees it with its last user.
// Peers receive the descriptor over a Unix socket (exchange.h). The size is sealed, so no peer can shrink it while
// another one uses it (which would cause a SIGBUS).
//
// A process maps each memfd once, however many of its ranks ask: map_memfd() finds an existing mapping by the kernel's
// identity of the file. So thread ranks share addresses as well as bytes, which lets ThreadSanitizer check the real
// protocol. This cache is state of the process (docs/architecture.md lists all of it);
// docs/decisions/0002-one-mapping-per-process.md gives the reasons.
//
// Thread-safety: functions, from any thread; a Mapping is immutable (what it maps is not).
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>

#include "base/fd.h"

namespace muster::shm {

// A memfd of `bytes`, sparse (it takes memory as it is touched), with its size sealed. Unavailable on failure.
UniqueFd create_memfd(const char* name, size_t bytes);

class Mapping {
 public:
  Mapping(std::byte* data, size_t size) : data_(data), size_(size) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_;
  size_t size_;
};

// Maps the whole of a memfd, readable and writable. CorruptError if the size is not sealed (the memfd did not come from
// create_memfd()).
std::shared_ptr<Mapping> map_memfd(int fd);

// Makes the kernel back [offset, offset + bytes) with memory now, so that a shortage is an error here and not a signal
// later. Unavailable, with the figures, if there is not enough.
void commit(int fd, size_t offset, size_t bytes);
// The opposite, for whole pages: they read as zeros, and take no memory until somebody touches them again.
void discard(int fd, size_t offset, size_t bytes);
size_t committed(int fd);  // bytes

// Whether this process may touch whole pages of a mapping. A touch of forbidden pages is a SIGSEGV.
void allow(std::byte* data, size_t bytes);
void forbid(std::byte* data, size_t bytes);

size_t page_size();
size_t memory_total();  // of the host, bytes
// Bytes that this process may take without swapping: of the host, and within the limits of its control groups. `root`:
// another file system, for tests.
size_t memory_available(const std::filesystem::path& root = "/");

constexpr size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace muster::shm
