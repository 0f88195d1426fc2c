// Collectives and messages of objects: settings, metrics, names, state dictionaries.
//
//   struct Report { std::string host; double loss; std::vector<int64_t> sizes; at::Tensor histogram;
//                   MSGPACK_DEFINE(host, loss, sizes, histogram); };
//   const auto reports = muster::gather_object(Report{…});   // on rank 0: one per rank; on the others: none
//
// An object is anything that msgpack-cxx packs: numbers, bool, enums (MSGPACK_ADD_ENUM), strings, byte strings,
// std::vector, array, map, set, tuple, pair, optional, unique_ptr, structs with MSGPACK_DEFINE; and at::Tensor, alone
// or inside of these. Tensors must be dense and on the CPU; they may have any shape and any dtype except the quantized
// ones, and may be undefined. A tensor that arrives is contiguous, has its own memory and does not require grad. A type
// must own its data (no string_view) and have a default constructor. A single string or byte string has at most 4 GiB,
// the limit of msgpack; tensors and whole objects are limited only by memory, which a rank needs twice: for the object
// and for its bytes.
//
// Each call is two collectives (or messages): the sizes, then the bytes. `.timeout` holds for each. Objects are copied
// several times on the way; send large data as tensors (collectives.h).
//
// Errors: as collectives.h. InvalidArgument, before anything is sent: a tensor that is none of the above, a list of the
// wrong length, an object that msgpack cannot pack. CorruptError: the received bytes do not parse as T, because the
// ranks named different types; the message names both. The operation is complete then, and the group can still be used.
// Unavailable: no memory for an object that arrives; this breaks the group, because the other ranks would wait for this
// one. An exception of an object's own pack or unpack function passes through.
//
// Thread-safety: see group.h; if two threads send objects to the same rank, each needs its own tag.
// Source: torch.distributed, broadcast_object_list, all_gather_object, gather_object, scatter_object_list,
// send_object_list, recv_object_list, with one object of any type, a vector too, in place of their lists.
//
// This header includes all of msgpack-cxx (Debian: libmsgpack-cxx-dev), so muster/muster.h does not include it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <typeinfo>
#include <utility>
#include <vector>

#include "muster/comm/collectives.h"
#include "muster/comm/tensor_msgpack.h"

namespace muster {
namespace detail {

// A packed object: the name of its type at the sender, for error messages, and the bytes from msgpack.
class PackedObject {
 public:
  explicit PackedObject(const std::type_info& type);
  void write(const char* data, size_t size) { bytes_.append(data, size); }  // msgpack's idea of a stream
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// A packed object that came from another rank.
struct ReceivedObject {
  at::Tensor bytes;  // kByte
  int from = 0;      // a rank in the group

  std::string_view packed() const;  // CorruptError if `bytes` has none
  [[noreturn]] void is_not(const std::type_info& wanted, std::string_view why) const;  // CorruptError
};

// These do both steps of an operation: the sizes, then the bytes.
ReceivedObject broadcast_bytes(const PackedObject* mine, int src, const CollectiveOptions& options, const Site& site);
std::vector<ReceivedObject> all_gather_bytes(const PackedObject& mine, const CollectiveOptions& options,
                                             const Site& site);
std::vector<ReceivedObject> gather_bytes(const PackedObject& mine, int dst, const CollectiveOptions& options,
                                         const Site& site);
ReceivedObject scatter_bytes(const std::vector<PackedObject>& parts, int src, const CollectiveOptions& options,
                             const Site& site);
void send_bytes(const PackedObject& object, int dst, const MessageOptions& options, const Site& site);
ReceivedObject recv_bytes(int src, const MessageOptions& options, const Site& site);
void check_scattered(size_t objects, int src, const Group& group);

[[noreturn]] void cannot_pack(const std::type_info& type, std::string_view why);

template <typename T>
PackedObject pack_object(const T& object) {
  PackedObject packed(typeid(T));
  try {
    msgpack::pack(packed, object);
  } catch (const msgpack::container_size_overflow& error) {
    cannot_pack(typeid(T), error.what());
  }
  return packed;
}

template <typename T>
T unpack_object(const ReceivedObject& received) {
  const std::string_view bytes = received.packed();
  try {
    // No container has more elements than there are bytes: msgpack rejects a wrong length before it allocates memory.
    const msgpack::unpack_limit limit(bytes.size(), bytes.size(), bytes.size(), bytes.size(), bytes.size());
    const auto refer = [](msgpack::type::object_type, std::size_t, void*) { return true; };  // `bytes` outlives it
    size_t end = 0;
    const msgpack::object_handle handle = msgpack::unpack(bytes.data(), bytes.size(), end, refer, nullptr, limit);
    if (end == bytes.size()) return handle.get().as<T>();
  } catch (const msgpack::type_error&) {
    received.is_not(typeid(T), "its parts are of other kinds");
  } catch (const msgpack::unpack_error& error) {
    received.is_not(typeid(T), error.what());
  }
  received.is_not(typeid(T), "bytes are left over");
}

template <typename T>
std::vector<T> unpack_objects(const std::vector<ReceivedObject>& received) {
  std::vector<T> objects;
  objects.reserve(received.size());
  for (const auto& each : received) objects.push_back(unpack_object<T>(each));
  return objects;
}

}  // namespace detail

// Rank src's object, on every rank; what the others give is not looked at.
template <typename T>
T broadcast_object(const T& object, int src = 0, const CollectiveOptions& options = {},
                   const Site& site = Site::current()) {
  if (options.group.rank() != src)
    return detail::unpack_object<T>(detail::broadcast_bytes(nullptr, src, options, site));
  const auto packed = detail::pack_object(object);
  detail::broadcast_bytes(&packed, src, options, site);
  return object;
}

// Every rank's object, in rank order, on every rank.
template <typename T>
std::vector<T> all_gather_object(const T& object, const CollectiveOptions& options = {},
                                 const Site& site = Site::current()) {
  return detail::unpack_objects<T>(detail::all_gather_bytes(detail::pack_object(object), options, site));
}

// Every rank's object, in rank order, on rank dst; an empty vector on the other ranks.
template <typename T>
std::vector<T> gather_object(const T& object, int dst = 0, const CollectiveOptions& options = {},
                             const Site& site = Site::current()) {
  return detail::unpack_objects<T>(detail::gather_bytes(detail::pack_object(object), dst, options, site));
}

// Rank src's objects[rank()]. Rank src gives one object per rank, the other ranks none: scatter_object<T>({}, src).
template <typename T>
T scatter_object(const std::vector<T>& objects, int src = 0, const CollectiveOptions& options = {},
                 const Site& site = Site::current()) {
  detail::check_scattered(objects.size(), src, options.group);
  std::vector<detail::PackedObject> parts;
  for (const auto& object : objects) parts.push_back(detail::pack_object(object));
  return detail::unpack_object<T>(detail::scatter_bytes(parts, src, options, site));
}

// Send one object from this rank to dst, and receive one from src. The sizes and the bytes are two messages with the
// tag of `options`; no other message with that tag may come between them. If `source` is not null, recv_object stores
// there the rank that sent the object (of use if src is kAnySource).
template <typename T>
void send_object(const T& object, int dst, const MessageOptions& options = {}, const Site& site = Site::current()) {
  detail::send_bytes(detail::pack_object(object), dst, options, site);
}
template <typename T>
T recv_object(int src, const MessageOptions& options = {}, int* source = nullptr, const Site& site = Site::current()) {
  const auto received = detail::recv_bytes(src, options, site);
  if (source) *source = received.from;
  return detail::unpack_object<T>(received);
}

}  // namespace muster
