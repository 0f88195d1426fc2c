// An allocator inside one memfd that peers map too: an address of its owner is an offset that means the same to all.
//
// The file is as large as the arena may ever grow, but sparse; memory is committed (mapping.h) from the front as it is
// needed, so peers map the file only once. Free runs are kept in order of address and joined with their neighbours; the
// smallest run that fits is used. Free memory at the end is returned to the kernel when it exceeds kKeep.
//
// Thread-safety: all methods. Only the owner allocates; peers read and write through their mapping of fd().
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/fd.h"
#include "shm/mapping.h"

namespace muster::shm {

class Arena {
 public:
  static constexpr size_t kAlignment = 128;  // two cache lines: what adjacent-line prefetch fetches together
  static constexpr size_t kKeep = 64 << 20;

  explicit Arena(size_t capacity);

  // In a process that was forked from the owner, allocate() throws Aborted and free() does nothing.
  //
  // At least `bytes`, aligned to kAlignment (from 64 KiB on, to a page). Unavailable if the arena or the host is full.
  void* allocate(size_t bytes);
  void free(void* address);
  // The block that `address` is in is never given out again: a peer that has not noticed a failure may still write to
  // it. Nothing happens if it is in none.
  void retire(const void* address);

  int fd() const { return fd_.get(); }
  std::byte* base() const { return mapping_->data(); }
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }
  bool contains(const void* address) const {
    const auto* p = static_cast<const std::byte*>(address);
    return p >= base() && p < base() + capacity_;
  }
  size_t offset_of(const void* address) const {
    return static_cast<size_t>(static_cast<const std::byte*>(address) - base());
  }

  size_t capacity() const { return capacity_; }
  size_t used() const;
  size_t committed() const;

 private:
  using Run = std::pair<size_t, size_t>;  // size, offset

  void insert_free(size_t offset, size_t size);
  void erase_free(size_t offset, size_t size);
  void grow_for(size_t bytes, size_t alignment);
  void trim();

  const size_t capacity_;
  const int forks_;  // a forked child has a copy of the tables, but shares the memory with its parent
  UniqueFd fd_;
  std::shared_ptr<Mapping> mapping_;
  mutable std::mutex mutex_;
  std::map<size_t, size_t> free_by_offset_;  // offset -> size
  std::set<Run> free_by_size_;
  std::map<size_t, size_t> live_;  // offset -> size
  std::set<size_t> retired_;       // offsets of live blocks
  size_t committed_ = 0, used_ = 0;
};

}  // namespace muster::shm
