#include "muster/parallel/memory_plan.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/collectives.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/row_parts.h"
#include "parallel/fsdp/units.h"
#include "parallel/gradients/gradient_reducer.h"
#include "parallel/kit/gradient_blocks.h"
#include "parallel/kit/hosts.h"
#include "parallel/kit/shared_tensor.h"
#include "parallel/modules/compute_copy.h"
#include "parallel/modules/same_module.h"
#include "parallel/tape/saved_tensors.h"

namespace muster {
namespace {

// Notes the storages of all tensors that operators save.
class Accountant final : public parallel::Keeper {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    return std::make_unique<parallel::Shown>([this](const at::Tensor& tensor) { add(tensor); });
  }

  // Storages of the graph: alive now, and not any more when `result` is gone. Parameters live on, and so does the input
  // of which a batch is a part.
  size_t bytes_that_end_with(at::Tensor result) {
    std::erase_if(saved_, [](const auto& item) { return item.second.storage.expired(); });
    result = at::Tensor();
    size_t sum = 0;
    for (const auto& [address, item] : saved_)
      if (item.storage.expired()) sum += item.bytes;
    return sum;
  }

 private:
  struct Item {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    size_t bytes;
  };

  void add(const at::Tensor& tensor) {
    if (!tensor.has_storage()) return;
    const auto storage = tensor.storage().getWeakStorageImpl();
    saved_.insert_or_assign(tensor.storage().unsafeGetStorageImpl(), Item{storage, tensor.storage().nbytes()});
  }

  std::unordered_map<const void*, Item> saved_;  // by address; an address may be used again
};

size_t saved_for_backward(const std::function<at::Tensor()>& forward) {
  if (!forward) return 0;
  parallel::require_keepers();
  const at::AutoGradMode with_grad(true);
  Accountant accountant;
  at::Tensor result;
  {
    const parallel::Keeping keeping(&accountant);
    result = forward();
  }
  return accountant.bytes_that_end_with(std::move(result));
}

// The processes of this host, each with one of its ranks. Ranks that are threads have a process together.
std::map<pid_t, int> processes_of(const parallel::Hosts& hosts) {
  std::map<pid_t, int> processes;
  for (const int rank : hosts.here()) processes.emplace(hosts.members[static_cast<size_t>(rank)].pid, rank);
  return processes;
}

size_t bytes_in(const at::Tensor& tensor, at::ScalarType dtype) {
  return static_cast<size_t>(tensor.numel()) * c10::elementSize(dtype);
}

// Of the largest units that may be on a host together, all that operators use.
size_t bytes_gathered(const torch::nn::Module& module, const std::vector<parallel::NamedTensor>& parameters,
                      const std::vector<at::ScalarType>& compute_dtypes, const FsdpOptions& options) {
  std::vector<size_t> bytes;
  for (const auto& unit :
       fsdp::make_units(module, parameters, parallel::bytes_of_mb(options.unit_cap_mb), options.is_unit)) {
    size_t& of_unit = bytes.emplace_back();
    for (const size_t i : unit) of_unit += bytes_in(parameters[i].tensor, compute_dtypes[i]);
  }
  std::sort(bytes.rbegin(), bytes.rend());
  if (options.reshard_after_forward) bytes.resize(std::min(bytes.size(), options.max_gathered_units));
  return std::accumulate(bytes.begin(), bytes.end(), size_t{0});
}

// Of the ranks of this host, which is the only one, together: the memory of large gradients on their way to their
// owners. A block serves gradients of one size (gradient_blocks.h), and each rank computes all gradients. So it has a
// block more of each size of which it does not own all. A parameter in rows is owned by all of its ranks; if it is the
// only one of its size, what a rank owns of its gradient is in that block.
size_t bytes_on_their_way(const std::vector<parallel::NamedTensor>& parameters, const parallel::Hosts& hosts,
                          const FsdpOptions& options) {
  std::vector<fsdp::RowPart> rows;
  if (std::isfinite(options.divide_above_mb))
    rows = fsdp::divide_rows(parameters, parallel::bytes_of_mb(options.divide_above_mb));
  const auto ownership =
      fsdp::owners_on_each_host(parameters, rows, hosts, parallel::bytes_of_mb(options.bucket_cap_mb));
  std::set<size_t> divided;
  for (const fsdp::RowPart& part : rows) divided.insert(part.parameter);
  struct OfSize {
    size_t gradients = 0;
    std::vector<size_t> owned;  // by place; whole ones
  };
  std::map<size_t, OfSize> sizes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& tensor = parameters[i].tensor;
    if (!tensor.requires_grad() || tensor.nbytes() < parallel::GradientBlocks::kLarge) continue;
    OfSize& size = sizes[tensor.nbytes()];
    size.owned.resize(static_cast<size_t>(hosts.owners));
    ++size.gradients;
    if (!divided.contains(i)) ++size.owned[static_cast<size_t>(ownership.owners[i].place)];
  }
  size_t sum = 0;
  for (const auto& [bytes, size] : sizes) {
    sum += bytes * static_cast<size_t>(std::count_if(size.owned.begin(), size.owned.end(),
                                                     [&](size_t owned) { return owned < size.gradients; }));
    const bool is_one_in_rows = size.gradients == 1 && std::count(size.owned.begin(), size.owned.end(), 1) == 0;
    if (is_one_in_rows) sum -= bytes;
  }
  return sum;
}

std::string in_mib(size_t bytes) {
  return text(static_cast<int64_t>(static_cast<double>(bytes) / (1 << 20) + 0.5), " MiB");
}

std::string line(const std::string& what, const std::string& rank, const std::string& host) {
  char out[160];
  std::snprintf(out, sizeof out, "  %-18s %14s %20s\n", what.c_str(), rank.c_str(), host.c_str());
  return out;
}

}  // namespace

size_t MemoryPlan::rank() const {
  size_t sum = 0;
  for (const Row& row : rows) sum += row.rank;
  return sum;
}

size_t MemoryPlan::host() const {
  size_t sum = 0;
  for (const Row& row : rows) sum += row.host;
  return sum;
}

std::string MemoryPlan::table(size_t measured) const {
  std::string all = line("", "each rank", text("this host, ", ranks, ranks == 1 ? " rank" : " ranks"));
  for (const Row& row : rows) all += line(row.what, in_mib(row.rank), in_mib(row.host));
  all += line("planned", in_mib(rank()), in_mib(host()));
  if (measured == 0) return all;
  const double more = 100 * (static_cast<double>(measured) / static_cast<double>(host()) - 1);
  char percent[40];
  std::snprintf(percent, sizeof percent, ", %.1f %% %s\n", std::abs(more), more < 0 ? "less" : "more");
  all += line("measured", "", in_mib(measured));
  all.replace(all.size() - 1, 1, percent);
  return all;
}

MemoryPlan memory_plan(const torch::nn::Module& module, const World& world, const std::function<at::Tensor()>& forward,
                       const MemoryPlanOptions& options) {
  const auto hosts = parallel::hosts_of(world.group(), world);
  const auto ranks = hosts.here().size(), owners = static_cast<size_t>(hosts.owners);
  MemoryPlan plan;
  plan.ranks = static_cast<int>(ranks);

  size_t all = 0, trained = 0, large = 0, private_now = 0, shared_now = 0;  // bytes of parameters
  const auto parameters = parallel::tensors_of(module).parameters;
  const auto compute_dtypes = parallel::compute_dtypes(module, parameters, options.fsdp.mixed_precision);
  size_t copies = 0;  // bytes, in mixed precision
  const bool one_host = hosts.ranks.size() == 1;
  const bool gathers = options.fully_sharded && options.fsdp.strategy == ShardingStrategy::kFullShard && !one_host;
  const size_t parts = gathers ? hosts.ranks.size() : 1;  // into which the parameters are divided among hosts
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, parameter] = parameters[i];
    if (parameter.layout() != at::kStrided)
      throw InvalidArgument(text("parameter ", name, " is not dense"), "memory_plan() counts dense parameters");
    if (forward && parallel::is_spread(parameter))
      throw InvalidArgument("forward() would gather parameters, which only the FullyShardedDataParallel may do",
                            "Call memory_plan() before FullyShardedDataParallel is made with kFullShard");
    all += parameter.nbytes();
    const size_t of_copy = bytes_in(parameter, compute_dtypes[i]);
    if (options.fully_sharded && compute_dtypes[i] != parameter.scalar_type()) copies += of_copy;
    if (const auto* const sharing = parallel::sharing_of(parameter))
      shared_now += (parameter.nbytes() + (sharing->instead ? of_copy : 0)) /
                    (parallel::is_spread(parameter) ? hosts.ranks.size() : 1);
    else if (!parameter.is_meta())
      private_now += parameter.nbytes();
    if (!parameter.requires_grad()) continue;
    trained += parameter.nbytes();
    if (parameter.nbytes() >= parallel::GradientBlocks::kLarge) large += parameter.nbytes();
  }
  const auto states_of = [&](size_t bytes) { return static_cast<size_t>(static_cast<double>(bytes) * options.states); };
  if (!options.fully_sharded) {
    plan.rows = {{"parameters", all, all * ranks},
                 {"gradients", trained, trained * ranks},
                 {"optimizer states", states_of(trained), states_of(trained) * ranks}};
  } else {
    const size_t small = trained - large;  // in buckets, which each rank has
    plan.rows = {{"parameters", all / parts / owners, all / parts},
                 one_host || gathers
                     ? MemoryPlan::Row{"gradients", large / parts / owners + small, large / parts + small * ranks}
                     : MemoryPlan::Row{"gradients", trained, trained * ranks},
                 {"optimizer states", states_of(trained) / parts / owners, states_of(trained) / parts}};
    if (one_host) {
      const size_t moving = bytes_on_their_way(parameters, hosts, options.fsdp);
      plan.rows.push_back({"communication", moving / ranks, moving});
    } else if (gathers) {
      const size_t most = std::min(parallel::bytes_of_mb(options.fsdp.bucket_cap_mb), large);
      plan.rows.push_back({"communication", most, most * ranks});
    }
  }
  if (copies > 0) plan.rows.insert(plan.rows.begin() + 1, {"copies", copies / parts / owners, copies / parts});
  if (gathers) {
    const size_t gathered = bytes_gathered(module, parameters, compute_dtypes, options.fsdp) * (parts - 1) / parts;
    plan.rows.push_back({"gathered units", gathered / owners, gathered});
  }
  const size_t activations = saved_for_backward(forward);
  // Each rank has its own copy of what is not shared yet.
  const size_t now = memory_of_host(world), known = private_now * ranks + shared_now;
  const size_t program = now > known ? now - known : 0;
  plan.rows.push_back({"activations", activations, activations * ranks});
  plan.rows.push_back({"program", program / processes_of(hosts).size(), program});
  return plan;
}

size_t memory_of_host(const World& world) {
  const auto hosts = parallel::hosts_of(world.group(), world);
  const at::Tensor mine = at::empty({1}, at::kLong), all = at::empty({world.world_size()}, at::kLong);
  release_free_memory();
  barrier({.group = world.group()});  // so that no rank takes or gives back memory while another one counts
  *mine.mutable_data_ptr<int64_t>() = static_cast<int64_t>(memory_of_process());
  all_gather_into_tensor(all, mine, {.group = world.group()});
  if (all.eq(0).any().item<bool>())
    throw Unavailable("the kernel of a host does not tell how much memory a process has",
                      "Mount /proc, on Linux 4.14 or later");
  int64_t sum = 0;
  for (const auto& [pid, rank] : processes_of(hosts)) sum += all.const_data_ptr<int64_t>()[rank];
  return static_cast<size_t>(sum);
}

}  // namespace muster
