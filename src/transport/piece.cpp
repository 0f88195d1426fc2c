#include "transport/piece.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>

#include "base/copy.h"

namespace muster::transport {
namespace {

constexpr size_t kMapped = size_t{32} << 20;  // a piece of at least this size is its own mapping

size_t rounded(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

}  // namespace

Piece make_piece(size_t bytes) {
  Piece piece;
  piece.bytes = bytes;
  if (bytes == 0) {
    alignas(kPieceAlignment) static std::byte nothing[kPieceAlignment];
    piece.data = nothing;
    piece.owner = std::shared_ptr<void>(std::shared_ptr<void>(), nothing);
    return piece;
  }
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  if (bytes >= kMapped) {
    // Huge pages cause far fewer page faults. With or without them, pages that are not written take no memory.
    const size_t size = rounded(bytes, size_t{4096});
    void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    ::madvise(at, size, MADV_HUGEPAGE);
    piece.owner = std::shared_ptr<void>(at, [size](void* p) { ::munmap(p, size); });
  } else {
    void* at = std::aligned_alloc(kPieceAlignment, rounded(bytes, kPieceAlignment));
    if (!at) throw std::bad_alloc();
    piece.owner = std::shared_ptr<void>(at, [](void* p) { std::free(p); });
  }
  piece.data = static_cast<std::byte*>(piece.owner.get());
  return piece;
}

Piece copy_of(std::span<const std::byte> data) {
  Piece piece = make_piece(data.size());
  copy_bytes(piece.data, data.data(), data.size());
  return piece;
}

}  // namespace muster::transport
