#include "rpc/kit/devices.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <utility>

#include "base/byte_stream.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::rpc {
namespace {

constexpr size_t kMostPairs = 255;  // a place is a byte on the wire

using Maps = std::map<std::string, DeviceMap>;

// The CPU as its tensors name it: without an index.
c10::Device plain(c10::Device device) { return device.is_cpu() ? c10::Device(c10::kCPU) : device; }

int count_of(c10::DeviceType type) {
  return c10::impl::hasDeviceGuardImpl(type) ? c10::impl::getDeviceGuardImpl(type)->deviceCount() : 0;
}

[[noreturn]] void bad(const std::string& worker, const std::string& peer, const std::string& what,
                      const std::string& advice) {
  throw InvalidArgument(text("the device map of worker \"", worker, "\" for \"", peer, "\" ", what), advice);
}

std::string encode(const Maps& maps) {
  WireWriter writer;
  writer.put(static_cast<uint32_t>(maps.size()));
  for (const auto& [worker, map] : maps) {
    writer.put(std::string_view(worker)).put(static_cast<uint32_t>(map.size()));
    for (const MappedDevice& pair : map)
      for (const c10::Device device : {plain(pair.here), plain(pair.there)})
        writer.put(device.type()).put(device.index());
  }
  return writer.take();
}

c10::Device decode_device(WireReader& reader) {
  const auto type = reader.get<int8_t>();
  const auto index = reader.get<c10::DeviceIndex>();
  if (type < 0 || type >= c10::COMPILE_TIME_MAX_DEVICE_TYPES || index < -1)
    throw CorruptError("a device map has a device that cannot exist");
  return {static_cast<c10::DeviceType>(type), index};
}

Maps decode(std::string_view bytes) {
  WireReader reader(bytes);
  Maps maps;
  for (auto left = reader.get<uint32_t>(); left > 0; --left) {
    DeviceMap& map = maps[std::string(reader.get_string())];
    for (auto pairs = reader.get<uint32_t>(); pairs > 0; --pairs) {
      const c10::Device here = decode_device(reader);
      map.push_back({.here = here, .there = decode_device(reader)});
    }
  }
  reader.expect_done();
  return maps;
}

// What a map's owner can check before it knows anything about the other worker's devices.
void check_form(const std::string& mine, const std::string& peer, const DeviceMap& map) {
  if (map.size() > kMostPairs)
    bad(mine, peer, text("has ", map.size(), " pairs"), text("At most ", kMostPairs, " devices can be mapped"));
  for (auto pair = map.begin(); pair != map.end(); ++pair) {
    for (const c10::Device device : {pair->here, pair->there}) {
      if (device.is_meta()) bad(mine, peer, "has the device meta", "Tensors there have no data to be sent");
      if (!device.is_cpu() && !device.has_index())
        bad(mine, peer, text("has ", device, " without an index"), text("Say which: ", device, ":0"));
    }
    for (auto other = map.begin(); other != pair; ++other)
      if (plain(other->here) == plain(pair->here) || plain(other->there) == plain(pair->there))
        bad(mine, peer,
            plain(other->here) == plain(pair->here) ? text("has ", pair->here, " here twice")
                                                    : text("has ", pair->there, " there twice"),
            "What a call gives back takes the map the other way round, so a device can be on each side only once");
  }
}

void check_exists(const std::string& owner, const std::string& peer, c10::Device device, const std::string& at) {
  if (device.is_cpu()) return;
  const int count = count_of(device.type());
  if (device.index() >= 0 && device.index() < count) return;
  const std::string type = c10::DeviceTypeName(device.type(), /*lower_case=*/true);
  bad(owner, peer, text("has ", device, ", which is not on worker \"", at, '"'),
      count > 0 ? text("There are ", type, ":0 … ", type, ':', count - 1)
                : text("It has no device of type ", type, ": see whether its libtorch is one with ", type));
}

}  // namespace

void Devices::meet(const Maps& maps, const Meeting& meeting) {
  if (std::find(meeting.has_maps.begin(), meeting.has_maps.end(), true) == meeting.has_maps.end()) return;
  const auto& workers = meeting.workers;
  const auto self = static_cast<size_t>(meeting.self);
  const std::string& mine = workers[self].name;
  const auto key = [&](const char* what, size_t rank) { return text(meeting.prefix, what, rank); };
  calls_to_.resize(workers.size());
  calls_from_.resize(workers.size());

  WireWriter found;
  if (meeting.has_maps[self]) meeting.store.set(key("/map/", self), encode(maps));
  try {
    for (const auto& [peer, map] : maps) {
      const auto named = [&](const WorkerInfo& worker) { return worker.name == peer; };
      const auto worker = std::find_if(workers.begin(), workers.end(), named);
      if (worker == workers.end()) {
        std::string all;
        for (const WorkerInfo& each : workers) all += text(all.empty() ? "" : ", ", '"', each.name, '"');
        bad(mine, peer, "is for a worker that does not exist", text("There are ", all));
      }
      check_form(mine, peer, map);
      for (const MappedDevice& pair : map) {
        check_exists(mine, peer, pair.here, mine);
        calls_to_[static_cast<size_t>(worker->id)].push_back(plain(pair.here));
      }
    }
    for (size_t rank = 0; rank < workers.size(); ++rank) {
      if (!meeting.has_maps[rank]) continue;
      const Maps theirs = decode(meeting.store.get(key("/map/", rank), meeting.deadline));
      const auto for_me = theirs.find(mine);
      if (for_me == theirs.end()) continue;
      for (const MappedDevice& pair : for_me->second) {
        check_exists(workers[rank].name, mine, pair.there, mine);
        calls_from_[rank].push_back(pair.there);
      }
    }
    found.put(std::string_view()).put(std::string_view());
  } catch (const InvalidArgument& error) {
    found.put(std::string_view(error.message())).put(std::string_view(error.advice()));
  }
  meeting.store.set(key("/found/", self), found.bytes());
  for (size_t rank = 0; rank < workers.size(); ++rank) {
    const std::string said = meeting.store.get(key("/found/", rank), meeting.deadline);
    WireReader reader(said);
    const auto message = reader.get_string(), advice = reader.get_string();
    if (!message.empty()) throw InvalidArgument(std::string(message), std::string(advice));
  }
}

}  // namespace muster::rpc
