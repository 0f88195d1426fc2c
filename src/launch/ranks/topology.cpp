#include "launch/ranks/topology.h"

#include <dlfcn.h>
#include <hwloc.h>
#include <sched.h>

#include <algorithm>
#include <climits>
#include <map>

#include "launch/kit/text_table.h"

namespace muster::launch {
namespace {

constexpr size_t kBits = sizeof(unsigned long) * CHAR_BIT;
constexpr size_t kMostProcessors = 1 << 16;

// The functions of hwloc that are used here. Its inline ones would need the library when this one is linked.
struct Hwloc {
  decltype(&::hwloc_topology_init) init = nullptr;
  decltype(&::hwloc_topology_load) load = nullptr;
  decltype(&::hwloc_topology_destroy) destroy = nullptr;
  decltype(&::hwloc_get_type_depth) depth_of = nullptr;
  decltype(&::hwloc_get_nbobjs_by_depth) count = nullptr;
  decltype(&::hwloc_get_obj_by_depth) object = nullptr;
  decltype(&::hwloc_bitmap_next) next = nullptr;
  bool there = false;

  Hwloc() {
    void* handle = ::dlopen("libhwloc.so.15", RTLD_LAZY | RTLD_LOCAL);  // the ABI of hwloc 2; stays
    if (!handle) return;
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(handle, name));
      return function != nullptr;
    };
    there = find(init, "hwloc_topology_init") && find(load, "hwloc_topology_load") &&
            find(destroy, "hwloc_topology_destroy") && find(depth_of, "hwloc_get_type_depth") &&
            find(count, "hwloc_get_nbobjs_by_depth") && find(object, "hwloc_get_obj_by_depth") &&
            find(next, "hwloc_bitmap_next");
  }
};

}  // namespace

std::vector<Core> cores_of_machine() {
  static const Hwloc hwloc;
  hwloc_topology_t topology = nullptr;
  if (!hwloc.there || hwloc.init(&topology) != 0) return {};
  std::vector<Core> cores;
  if (hwloc.load(topology) == 0) {
    // Virtual machines may show no cores; then each processor is one.
    int depth = hwloc.depth_of(topology, HWLOC_OBJ_CORE);
    if (depth < 0) depth = hwloc.depth_of(topology, HWLOC_OBJ_PU);
    std::map<hwloc_obj_t, int> packages;
    for (unsigned i = 0; depth >= 0 && i < hwloc.count(topology, depth); ++i) {
      const hwloc_obj_t object = hwloc.object(topology, depth, i);
      hwloc_obj_t package = object;
      while (package && package->type != HWLOC_OBJ_PACKAGE) package = package->parent;
      Core core{.package = packages.try_emplace(package, static_cast<int>(packages.size())).first->second};
      for (int processor = hwloc.next(object->cpuset, -1); processor >= 0;
           processor = hwloc.next(object->cpuset, processor))
        core.processors.push_back(processor);
      if (!core.processors.empty()) cores.push_back(std::move(core));
    }
  }
  hwloc.destroy(topology);
  std::stable_sort(cores.begin(), cores.end(), [](const Core& a, const Core& b) { return a.package < b.package; });
  return cores;
}

std::set<int> allowed_processors() {
  std::set<int> allowed;
  // The kernel says EINVAL if the mask is too small for it.
  for (size_t size = 1024; size <= kMostProcessors; size *= 2) {
    std::vector<unsigned long> mask(size / kBits);
    if (::sched_getaffinity(0, mask.size() * sizeof(unsigned long), reinterpret_cast<cpu_set_t*>(mask.data())) != 0)
      continue;
    for (size_t i = 0; i < size; ++i)
      if ((mask[i / kBits] >> (i % kBits) & 1) != 0) allowed.insert(static_cast<int>(i));
    break;
  }
  return allowed;
}

std::vector<Core> only(std::vector<Core> cores, const std::set<int>& allowed) {
  for (auto& core : cores) std::erase_if(core.processors, [&](int processor) { return !allowed.contains(processor); });
  std::erase_if(cores, [](const Core& core) { return core.processors.empty(); });
  return cores;
}

std::vector<unsigned long> mask_of(const std::vector<int>& processors) {
  std::vector<unsigned long> mask;
  for (const int processor : processors) {
    const auto bit = static_cast<size_t>(processor);
    if (mask.size() <= bit / kBits) mask.resize(bit / kBits + 1);
    mask[bit / kBits] |= 1ul << (bit % kBits);
  }
  return mask;
}

std::string name_of(const std::vector<int>& processors) { return human_ranks(processors); }

}  // namespace muster::launch
