#include "shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <iterator>

#include "base/fork_count.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::shm {
namespace {

constexpr size_t kLarge = 64 << 10;
constexpr size_t kStep = 1 << 20;  // memory is committed in steps of this size

}  // namespace

Arena::Arena(size_t capacity)
    : capacity_(round_up(std::max(capacity, kStep), kStep)),
      forks_(fork_count()),
      fd_(create_memfd("muster-heap", capacity_)),
      mapping_(map_memfd(fd_.get())) {}

size_t Arena::used() const {
  const std::lock_guard lock(mutex_);
  return used_;
}

size_t Arena::committed() const {
  const std::lock_guard lock(mutex_);
  return committed_;
}

void* Arena::allocate(size_t bytes) {
  if (fork_count() != forks_) throw Aborted("the heap belongs to the process that this one was forked from");
  if (bytes > capacity_)
    throw Unavailable(text("the shared heap has no room for ", bytes, " bytes"), "Raise WorldOptions::heap_capacity");
  // Large runs start and end on pages, so that two ranks' copies never share a page and trim() finds whole pages.
  const size_t size = round_up(std::max<size_t>(bytes, 1), bytes >= kLarge ? page_size() : kAlignment);
  const size_t alignment = bytes >= kLarge ? page_size() : kAlignment;
  const std::lock_guard lock(mutex_);
  for (bool grown = false;; grown = true) {
    for (auto run = free_by_size_.lower_bound({size, 0}); run != free_by_size_.end(); ++run) {
      const auto [run_size, run_offset] = *run;
      const size_t offset = round_up(run_offset, alignment);
      if (offset + size > run_offset + run_size) continue;
      erase_free(run_offset, run_size);
      if (offset > run_offset) insert_free(run_offset, offset - run_offset);
      if (const size_t end = offset + size; end < run_offset + run_size) insert_free(end, run_offset + run_size - end);
      live_.emplace(offset, size);
      used_ += size;
      return base() + offset;
    }
    if (grown) break;
    grow_for(size, alignment);
  }
  throw Unavailable(text("the shared heap has no room for ", bytes, " bytes"), "Raise WorldOptions::heap_capacity");
}

void Arena::free(void* address) {
  if (fork_count() != forks_) return;  // the lock may be held by a thread that the child does not have
  const std::lock_guard lock(mutex_);
  const auto block = live_.find(offset_of(address));
  if (block == live_.end()) return;  // not a block of this arena: cannot happen through Heap
  if (retired_.contains(block->first)) return;
  size_t offset = block->first, size = block->second;
  live_.erase(block);
  used_ -= size;
  // Join with the free neighbours.
  const auto after = free_by_offset_.lower_bound(offset);
  if (after != free_by_offset_.end() && after->first == offset + size) {
    const size_t after_size = after->second;
    erase_free(offset + size, after_size);
    size += after_size;
  }
  if (const auto next = free_by_offset_.lower_bound(offset); next != free_by_offset_.begin()) {
    const auto [before_offset, before_size] = *std::prev(next);
    if (before_offset + before_size == offset) {
      erase_free(before_offset, before_size);
      offset = before_offset;
      size += before_size;
    }
  }
  insert_free(offset, size);
  trim();
}

void Arena::retire(const void* address) {
  if (fork_count() != forks_ || !contains(address)) return;
  const std::lock_guard lock(mutex_);
  auto block = live_.upper_bound(offset_of(address));
  if (block == live_.begin()) return;
  --block;
  if (offset_of(address) < block->first + block->second) retired_.insert(block->first);
}

void Arena::insert_free(size_t offset, size_t size) {
  free_by_offset_.emplace(offset, size);
  free_by_size_.emplace(size, offset);
}

void Arena::erase_free(size_t offset, size_t size) {
  free_by_offset_.erase(offset);
  free_by_size_.erase({size, offset});
}

// Appends committed memory so that an aligned run of `bytes` exists at the end.
void Arena::grow_for(size_t bytes, size_t alignment) {
  size_t have = 0;
  if (!free_by_offset_.empty())
    if (const auto& [offset, size] = *free_by_offset_.rbegin(); offset + size == committed_) have = size;
  const size_t end = round_up(committed_ - have, alignment) + bytes;
  const size_t add = round_up(end - committed_, kStep);
  if (add > capacity_ - committed_)
    throw Unavailable(text("the shared heap is full: ", used_, " of ", capacity_, " bytes are in use, and ", bytes,
                           " more were requested"),
                      "Raise WorldOptions::heap_capacity or free tensors");
  commit(fd_.get(), committed_, add);
  // The pages exist; entering them into the page table now saves a page fault for each later. This may fail on kernels
  // before 5.14, which does no harm.
#ifdef MADV_POPULATE_WRITE
  ::madvise(base() + committed_, add, MADV_POPULATE_WRITE);
#endif
  const size_t start = committed_ - have;
  if (have > 0) erase_free(start, have);
  insert_free(start, have + add);
  committed_ += add;
}

void Arena::trim() {
  if (free_by_offset_.empty()) return;
  const auto [offset, size] = *free_by_offset_.rbegin();
  if (offset + size != committed_ || size <= kKeep) return;
  const size_t keep_until = round_up(offset, kStep);
  if (keep_until >= committed_) return;
  if (::fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(keep_until),
                  static_cast<off_t>(committed_ - keep_until)) != 0)
    return;  // the arena keeps the memory for later use
  erase_free(offset, size);
  if (keep_until > offset) insert_free(offset, keep_until - offset);
  committed_ = keep_until;
}

}  // namespace muster::shm
