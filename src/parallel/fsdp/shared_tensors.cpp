#include "parallel/fsdp/shared_tensors.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "parallel/kit/host_memory.h"
#include "shm/mapping.h"

namespace muster::fsdp {
namespace {

// Every rank makes memory of bytes[its place], and maps that of its host's ranks. Nothing of it is committed yet; a
// host will need `at_most` bytes of it.
parallel::HostMemory share_memory(const std::vector<size_t>& bytes, size_t at_most, const parallel::Hosts& hosts,
                                  const Group& group, const World& world) {
  const auto bytes_of = [&](int rank) {
    const auto place = static_cast<size_t>(hosts.place_of(rank));
    return place < bytes.size() ? bytes[place] : 0;
  };
  auto memory = parallel::share_memory(bytes_of(group.rank()), at_most, hosts, group, world);
  for (const int rank : hosts.here())
    if (memory.mapped[static_cast<size_t>(rank)]->size() < bytes_of(rank))
      throw CorruptError(text("rank ", group.global_rank(rank), " sent too little memory for its parameters"),
                         "Run the same version of Muster on all ranks");
  return memory;
}

std::shared_ptr<Gatherer> make_gatherer(const ParameterLayout& layout, const Gathering& gathering,
                                        const parallel::HostMemory& memory, const parallel::Hosts& hosts,
                                        const Group& group) {
  const auto host = static_cast<int>(hosts.own);
  const int place = hosts.place_of(group.rank());
  const bool owns = place < hosts.owners;
  std::vector<std::byte*> of_places;
  for (int each = 0; each < hosts.owners; ++each)
    of_places.push_back(memory.mapped[static_cast<size_t>(hosts.owner(each))]->data());
  return std::make_shared<Gatherer>(Gatherer::Setup{
      .pieces =
          owns ? layout.pieces[static_cast<size_t>(place)] : decltype(Gatherer::Setup::pieces)(gathering.units.size()),
      .elsewhere = layout.elsewhere(host, of_places),
      .memory = memory.own.get(),
      .mapped = memory.mapped[static_cast<size_t>(group.rank())],
      .host = host,
      .group = group,
      .ranks_of_host = group.split(host, 0, {.name = "parameters on one host", .parents_ranks = true}),
      .column = group.split(owns ? place : -1, host, {.name = "parameters between hosts", .parents_ranks = true}),
      .most = gathering.most});
}

// Lets the gatherer know before a parameter of a unit is used.
void gather_before_use(parallel::Sharing& sharing, const std::weak_ptr<Gatherer>& gatherer, size_t unit,
                       bool is_at_home, const std::string& name) {
  sharing.before_use = [=](uint64_t operation, bool writes) {
    if (const auto at = gatherer.lock())
      at->before_use(unit, is_at_home, name, operation, writes);
    else if (!is_at_home)
      throw InvalidArgument(text("the values of parameter ", name, " are on another host"),
                            "Keep the FullyShardedDataParallel as long as you use its module");
  };
  sharing.is_here = [=] {
    const auto at = gatherer.lock();
    return is_at_home || (at && at->has_all());
  };
}

}  // namespace

SharedTensors::SharedTensors(const std::vector<parallel::NamedTensor>& like, const Setup& setup)
    : layout_(lay_out(like, setup.owners, setup.hosts, setup.gathering.units, setup.gathering.most)),
      hosts_(setup.hosts),
      group_(setup.group),
      owners_(setup.owners) {
  const auto& [owners, hosts, group, world, gathering, bytes_beside, is_copy, instead] = setup;
  parallel::HostMemory memory = share_memory(layout_.bytes, layout_.at_most + bytes_beside, hosts, group, world);
  if (!gathering.units.empty()) gatherer_ = make_gatherer(layout_, gathering, memory, hosts, group);
  memory_ = std::move(memory.own);
  for (int place = 0; place < hosts.owners; ++place)
    mapped_.push_back(memory.mapped[static_cast<size_t>(hosts.owner(place))]);

  std::vector<size_t> unit_of(like.size());
  for (size_t u = 0; u < gathering.units.size(); ++u)
    for (const size_t i : gathering.units[u]) unit_of[i] = u;
  for (size_t i = 0; i < like.size(); ++i) {
    const auto& [name, tensor] = like[i];
    parallel::Sharing sharing = sharing_of(name, owners[i]);
    sharing.is_copy = is_copy(i);
    sharing.instead = instead(i);
    if (gatherer_)
      gather_before_use(sharing, gatherer_, unit_of[i], owners[i].host == static_cast<int>(hosts.own), name);
    const auto keeper = static_cast<size_t>(hosts.owner(owners[i].place));
    tensors_.push_back(parallel::shared_tensor(memory.mapped[keeper], layout_.offsets[i], tensor, std::move(sharing)));
  }
}

parallel::Sharing SharedTensors::sharing_of(const std::string& name, const Owner& owner) const {
  const int rank = rank_of(owner, hosts_, group_.rank()), first = rank_of(owner, hosts_, hosts_.ranks[0][0]);
  return {.name = name,
          .owner = group_.global_rank(rank),
          .is_own = rank == group_.rank(),
          .first_owner = group_.global_rank(first),
          .is_only_owner = owner.host != kEachHost || hosts_.ranks.size() == 1};
}

at::Tensor SharedTensors::rows(const RowPart& part, size_t index, const Owner& owner) const {
  const at::Tensor& whole = tensors_[index];
  return parallel::shared_tensor(mapped_[static_cast<size_t>(owners_[index].place)],
                                 layout_.offsets[index] + static_cast<size_t>(part.range.offset) * whole.element_size(),
                                 part.range.of(whole), sharing_of(part.name, owner));
}

void SharedTensors::commit(size_t index) const {
  if (tensors_[index].numel() > 0) shm::commit(memory_.get(), layout_.offsets[index], room_for(tensors_[index]));
}

}  // namespace muster::fsdp
