// The part of objects.h that does not depend on the types of objects, nor on msgpack.
#include "muster/comm/objects.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/GradMode.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/text.h"
#include "comm/core/backend.h"
#include "muster/base/error.h"

namespace muster::detail {
namespace {

// "std::vector<int>". Names of templates with many parameters are cut.
std::string name_of(const std::type_info& type) {
  constexpr size_t kLongest = 160;
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> readable(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  std::string name = status == 0 ? readable.get() : type.name();
  constexpr std::string_view kString =
      "std::__cxx11::basic_string<char, std::char_traits<char>, std::allocator<char> >";
  for (size_t at; (at = name.find(kString)) != std::string::npos;) name.replace(at, kString.size(), "std::string");
  if (name.size() > kLongest) name = name.substr(0, kLongest) + "…";
  return name;
}

// A packed object begins with the number of bytes of the type's name, and the name.
using NameSize = uint32_t;
bool split(std::string_view bytes, std::string_view& name, std::string_view& rest) {
  NameSize size = 0;
  if (bytes.size() < sizeof size) return false;
  std::memcpy(&size, bytes.data(), sizeof size);
  bytes.remove_prefix(sizeof size);
  if (bytes.size() < size) return false;
  name = bytes.substr(0, size);
  rest = bytes.substr(size);
  return true;
}

std::string_view view(const at::Tensor& bytes) {
  return {static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()};
}

at::Tensor tensor_of(const PackedObject& object) {
  return at::from_blob(const_cast<char*>(object.bytes().data()), {static_cast<int64_t>(object.bytes().size())},
                       at::kByte);
}

// What a rank says that it will send, as a tensor of one number.
at::Tensor size_of(int64_t bytes = 0) {
  const at::Tensor size = at::empty({1}, at::kLong);
  *size.mutable_data_ptr<int64_t>() = bytes;
  return size;
}
at::Tensor size_of(const PackedObject& object) { return size_of(static_cast<int64_t>(object.bytes().size())); }
int64_t number(const at::Tensor& size) { return *size.const_data_ptr<int64_t>(); }

// Allocates memory for the object that rank `from` has announced. If that fails, the group fails, because the others
// would wait for this rank.
at::Tensor room_for(int64_t bytes, int from, const Group& group) {
  if (bytes < static_cast<int64_t>(sizeof(NameSize)))
    throw CorruptError(text("rank ", from, " announces an object of ", bytes, " bytes"),
                       "Receive objects with recv_object, and tensors with recv");
  try {
    return at::empty({bytes}, at::kByte);
  } catch (const std::exception&) {
    const Unavailable error(
        text("rank ", group.rank(), " has no memory for an object of ", bytes, " bytes from rank ", from),
        "Send smaller objects, or tensors");
    comm::backend_of(group).fail(error);
    throw error;
  }
}

}  // namespace

PackedObject::PackedObject(const std::type_info& type) {
  const std::string name = name_of(type);
  const auto size = static_cast<NameSize>(name.size());
  bytes_.append(reinterpret_cast<const char*>(&size), sizeof size);
  bytes_ += name;
}

std::string_view ReceivedObject::packed() const {
  std::string_view name, rest;
  if (!split(view(bytes), name, rest))
    throw CorruptError(text("what rank ", from, " sent is not an object"), "Receive tensors with recv");
  return rest;
}

void ReceivedObject::is_not(const std::type_info& wanted, std::string_view why) const {
  std::string_view name, rest;
  split(view(bytes), name, rest);
  throw CorruptError(text("rank ", from, " sent a ", name, " of ", rest.size(), " bytes, which cannot be read as ",
                          name_of(wanted), ": ", why),
                     "Name the same type on all ranks");
}

void cannot_pack(const std::type_info& type, std::string_view why) {
  throw InvalidArgument(text("a ", name_of(type), " cannot be sent: ", why),
                        "A string may have at most 4 GiB, a container 2^32 elements; use a tensor for more");
}

// --- the operations ---

ReceivedObject broadcast_bytes(const PackedObject* mine, int src, const CollectiveOptions& options, const Site& site) {
  const at::Tensor size = mine ? size_of(*mine) : size_of();
  broadcast(size, src, options, site);
  const at::Tensor bytes = mine ? tensor_of(*mine) : room_for(number(size), src, options.group);
  broadcast(bytes, src, options, site);
  return {bytes, src};
}

std::vector<ReceivedObject> all_gather_bytes(const PackedObject& mine, const CollectiveOptions& options,
                                             const Site& site) {
  const int n = options.group.size();
  const at::Tensor sizes = at::empty({n}, at::kLong);
  all_gather_into_tensor(sizes, size_of(mine), options, site);
  std::vector<ReceivedObject> received;
  std::vector<at::Tensor> outputs;
  for (int r = 0; r < n; ++r) {
    outputs.push_back(room_for(sizes.const_data_ptr<int64_t>()[r], r, options.group));
    received.push_back({outputs.back(), r});
  }
  all_gather(outputs, tensor_of(mine), options, site);
  return received;
}

// The bytes travel by all_to_all, the one collective whose parts may differ in size without padding.
std::vector<ReceivedObject> gather_bytes(const PackedObject& mine, int dst, const CollectiveOptions& options,
                                         const Site& site) {
  const int n = options.group.size();
  const bool root = options.group.rank() == dst;
  std::vector<at::Tensor> sizes;
  for (int r = 0; root && r < n; ++r) sizes.push_back(size_of());
  gather(size_of(mine), sizes, dst, options, site);
  const at::Tensor nothing = at::empty({0}, at::kByte);
  std::vector<at::Tensor> inputs(static_cast<size_t>(n), nothing), outputs = inputs;
  inputs[static_cast<size_t>(dst)] = tensor_of(mine);
  std::vector<ReceivedObject> received;
  for (int r = 0; root && r < n; ++r) {
    at::Tensor& output = outputs[static_cast<size_t>(r)];
    output = room_for(number(sizes[static_cast<size_t>(r)]), r, options.group);
    received.push_back({output, r});
  }
  all_to_all(outputs, inputs, options, site);
  return received;
}

void check_scattered(size_t objects, int src, const Group& group) {
  const int n = group.size(), rank = group.rank();
  if (rank == src && objects != static_cast<size_t>(n))
    throw InvalidArgument(
        text("scatter_object: objects: expected one for each rank of a group of ", n, ", got ", objects),
        "Give one for each rank");
  if (rank != src && objects != 0)
    throw InvalidArgument(
        text("scatter_object: objects were given on rank ", rank, ", which is not the source (", src, ")"),
        "Give them on the source alone");
}

ReceivedObject scatter_bytes(const std::vector<PackedObject>& parts, int src, const CollectiveOptions& options,
                             const Site& site) {
  std::vector<at::Tensor> sizes;
  for (const auto& part : parts) sizes.push_back(size_of(part));
  const at::Tensor size = size_of();
  scatter(size, sizes, src, options, site);
  const auto n = static_cast<size_t>(options.group.size());
  const at::Tensor nothing = at::empty({0}, at::kByte);
  std::vector<at::Tensor> inputs(n, nothing), outputs = inputs;
  for (size_t r = 0; r < parts.size(); ++r) inputs[r] = tensor_of(parts[r]);
  at::Tensor& output = outputs[static_cast<size_t>(src)];
  output = room_for(number(size), src, options.group);
  all_to_all(outputs, inputs, options, site);
  return {output, src};
}

void send_bytes(const PackedObject& object, int dst, const MessageOptions& options, const Site& site) {
  send(size_of(object), dst, options, site);
  send(tensor_of(object), dst, options, site);
}

ReceivedObject recv_bytes(int src, const MessageOptions& options, const Site& site) {
  const at::Tensor size = size_of();
  const int from = recv(size, src, options, site);
  const at::Tensor bytes = room_for(number(size), from, options.group);
  recv(bytes, from, options, site);
  return {bytes, from};
}

}  // namespace muster::detail
