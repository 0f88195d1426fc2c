#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <functional>
#include <optional>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/optim/clip_grad.h"
#include "muster/parallel/fsdp.h"
#include "parallel/fsdp/owners.h"
#include "parallel/fsdp/shared_parameters.h"
#include "parallel/fsdp/units.h"
#include "parallel/gradients/gradient_reducer.h"
#include "parallel/kit/hosts.h"
#include "parallel/modules/compute_copy.h"
#include "parallel/modules/parameter_watch.h"
#include "parallel/tape/watched.h"

namespace muster::fsdp {
namespace {

// FNV-1a, so that the seed is the same on every machine.
at::Generator generator_for(const std::string& name, uint64_t seed) {
  uint64_t hash = 0xCBF29CE484222325;
  const auto add = [&](uint64_t byte) { hash = (hash ^ byte) * 0x100000001B3; };
  for (int shift = 0; shift < 64; shift += 8) add(seed >> shift & 0xFF);
  for (const char letter : name) add(static_cast<unsigned char>(letter));
  return at::detail::createCPUGenerator(hash ^ hash >> 32);  // which uses the lower half
}

// Every rank fills its own. If that fails on one, all throw, and no buffer has changed.
void fill_buffers(const std::vector<parallel::NamedTensor>& buffers, const FsdpOptions& options, const Group& group) {
  std::vector<std::pair<at::Tensor, at::Tensor>> filled;
  std::exception_ptr failure;
  try {
    for (const auto& [name, buffer] : buffers) {
      if (!buffer.is_meta()) continue;
      filled.emplace_back(buffer, at::empty_like(buffer, at::TensorOptions(at::kCPU)));
      options.init(name, filled.back().second, generator_for(name, options.init_seed));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  parallel::throw_if_any_failed(failure, group, "could not fill its tensors");
  for (const auto& [buffer, values] : filled) parallel::give_values(buffer, values);
}

// With its index; none if it is the CPU. Unavailable if this process has no such device.
std::optional<at::Device> checked_device(const std::optional<at::Device>& wanted) {
  if (!wanted || wanted->is_cpu()) return {};
  if (wanted->is_meta())
    throw InvalidArgument("compute_device: expected a device that computes, got meta", "Use the device that computes");
  const bool is_known = c10::impl::hasDeviceGuardImpl(wanted->type());
  const c10::DeviceIndex count =
      is_known ? c10::impl::VirtualGuardImpl(wanted->type()).deviceCount() : c10::DeviceIndex{0};
  if (count == 0 || wanted->index() >= count)
    throw Unavailable(text("compute_device is ", wanted->str(), ", and this process has ", int{count}, " devices of ",
                           c10::DeviceTypeName(wanted->type(), /*lower_case=*/true)),
                      "Use another device, or a libtorch that is built for it");
  return wanted->has_index() ? *wanted : c10::impl::VirtualGuardImpl(wanted->type()).getDevice();
}

// Also those that torch::load() has replaced.
void move_buffers(const std::vector<parallel::NamedTensor>& buffers, const at::Device& device) {
  const at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers)
    if (buffer.device() != device) parallel::give_values(buffer, buffer.to(device));
}

// From rank 0, over the CPU.
void broadcast_from_devices(const std::vector<parallel::NamedTensor>& buffers, const Group& group) {
  if (group.size() == 1) return;
  const at::NoGradGuard no_grad;
  std::vector<parallel::NamedTensor> on_host;
  for (const auto& [name, buffer] : buffers) on_host.push_back({name, buffer.to(at::kCPU)});
  parallel::broadcast_together(on_host, group);
  if (group.rank() == 0) return;
  // As on the CPU, graphs that have saved a buffer do not notice.
  for (size_t i = 0; i < buffers.size(); ++i) buffers[i].tensor.variable_data().copy_(on_host[i].tensor);
}

}  // namespace

struct Sharder::Impl {
  std::shared_ptr<torch::nn::Module> module;
  FsdpOptions options;
  Group group;                                             // resolved
  std::vector<parallel::NamedTensor> parameters, buffers;  // each parameter once
  // Of `parameters`; on this host, if each host has one. kRanksOfParts: its parts have owners.
  std::vector<int> owners;
  std::vector<RowPart> parts;
  std::vector<int> owners_of_parts;
  int copies = 1;           // of each parameter, on hosts of their own
  std::vector<Unit> units;  // if parameters are gathered
  std::shared_ptr<SharedParameters> shared;
  std::optional<parallel::GradientReducer> gradients;  // none if no parameter is trained
  std::optional<parallel::ParameterWatch> watch;

  void for_each_part_of(size_t parameter, const std::function<void(size_t part)>& fn) const {
    for (size_t k = 0; k < parts.size(); ++k)
      if (parts[k].parameter == parameter) fn(k);
  }
  // Of all parameters, or their parts, in the order of parameters().
  void for_each_with_owner(const std::function<void(const at::Tensor& parameter, int owner)>& fn) const {
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (owners[i] == parallel::kRanksOfParts)
        for_each_part_of(i, [&](size_t k) { fn(shared->parts()[k], owners_of_parts[k]); });
      else
        fn(parameters[i].tensor, owners[i]);
    }
  }

  // Before anything that changes what a backward() uses: one that threw may still be in a node on the device.
  void let_backward_end() const {
    if (options.compute_device) wait_for_autograd(*options.compute_device);
  }
  // Also makes up for what a backward() that threw has left out.
  void end_backward() {
    let_backward_end();
    if (gradients) gradients->end_failed_backward();
  }
  std::shared_ptr<void> forward() const {
    return parallel::makes_copies(options.mixed_precision) || options.compute_device
               ? std::make_shared<parallel::ForwardWithCopies>(shared->phase())
               : nullptr;
  }
};

Sharder::Sharder(std::shared_ptr<torch::nn::Module> module, FsdpOptions options) : impl_(std::make_unique<Impl>()) {
  if (!module) throw InvalidArgument("FullyShardedDataParallel needs a module, got null");
  if (at::empty({0}).is_meta())
    throw InvalidArgument("FullyShardedDataParallel is made while an OnMeta guard lives",
                          "End the guard when the module is made, or use on_meta()");
  Impl& s = *impl_;
  s.module = std::move(module);
  s.options = std::move(options);
  World& world = World::current();
  auto with = parallel::reducer_options("FullyShardedDataParallel", s.options);
  s.group = with.group;

  if (!(s.options.unit_cap_mb > 0) || s.options.max_gathered_units < 2)
    throw InvalidArgument(text("unit_cap_mb and max_gathered_units: expected a number above 0, and 2 or more, got ",
                               s.options.unit_cap_mb, " and ", s.options.max_gathered_units),
                          "Use a size above 0, in MiB, and at least 2 units: one in use, and the next one");

  if (!(s.options.divide_above_mb >= 1))
    throw InvalidArgument(text("divide_above_mb: expected a number of at least 1, got ", s.options.divide_above_mb),
                          "Use MiB: smaller parameters are balanced well enough as a whole");

  const MixedPrecision& precision = s.options.mixed_precision;
  parallel::check(precision);
  s.options.compute_device = checked_device(s.options.compute_device);
  const std::optional<at::Device>& device = s.options.compute_device;
  auto tensors = parallel::tensors_of(*s.module);
  for (const auto& [name, tensor] : tensors.parameters)
    if (!(tensor.device().is_cpu() || tensor.is_meta()) || tensor.layout() != at::kStrided)
      throw InvalidArgument(text("parameter ", name, " is not a dense CPU tensor"),
                            device ? "Leave the module on the CPU: compute_device gets copies of what it needs"
                                   : "FullyShardedDataParallel shards dense parameters on the CPU");
  for (const auto& [name, tensor] : tensors.all)
    if (tensor.is_meta() && !s.options.init)
      throw InvalidArgument(text(name, " has no values, because it was made on the device meta"),
                            "Set FsdpOptions::init, which fills it");
  const parallel::Hosts hosts = parallel::hosts_of(s.group, world);
  const size_t group_bytes = parallel::bytes_of_mb(s.options.bucket_cap_mb);
  const bool gathers = s.options.strategy == ShardingStrategy::kFullShard && hosts.ranks.size() > 1;
  const bool divides = std::isfinite(s.options.divide_above_mb);
  if (gathers && divides)
    throw InvalidArgument("divide_above_mb: kFullShard over several hosts does not divide parameters into rows",
                          "Use kHybridShard, or leave divide_above_mb out");
  if (gathers || device)
    s.units =
        make_units(*s.module, tensors.parameters, parallel::bytes_of_mb(s.options.unit_cap_mb), s.options.is_unit);
  const auto compute_dtypes = parallel::compute_dtypes(*s.module, tensors.parameters, precision);
  std::string chosen = text(parallel::words_of(with), parallel::words_of(*s.module, precision, compute_dtypes),
                            " strategy=", static_cast<int>(s.options.strategy),
                            " reshard_after_forward=", s.options.reshard_after_forward,
                            " max_gathered_units=", s.options.max_gathered_units, " init_seed=", s.options.init_seed,
                            " divide_above_mb=", s.options.divide_above_mb,
                            " compute_device=", device ? c10::DeviceTypeName(device->type()) : "CPU", " units=");
  for (const Unit& unit : s.units) chosen += text("[", join(unit), "]");
  parallel::require_same_on_all_ranks(tensors.all, chosen, s.group);
  parallel::require_values_on_all_ranks(tensors.all, s.group);
  fill_buffers(tensors.buffers, s.options, s.group);
  if (device) move_buffers(tensors.buffers, at::kCPU);  // another FullyShardedDataParallel may have moved them
  parallel::broadcast_together(tensors.all, s.group);
  parallel::convert_buffers(*s.module, precision);
  if (device) move_buffers(tensors.buffers, *device);
  s.parameters = std::move(tensors.parameters);
  s.buffers = std::move(tensors.buffers);
  s.watch.emplace("FullyShardedDataParallel", s.parameters, s.parameters);

  if (divides) s.parts = divide_rows(s.parameters, parallel::bytes_of_mb(s.options.divide_above_mb));
  const Ownership ownership = gathers ? owners_on_one_host(s.parameters, s.units, hosts, group_bytes)
                                      : owners_on_each_host(s.parameters, s.parts, hosts, group_bytes);
  const auto to_rank = [&](const Owner& owner) { return rank_of(owner, hosts, s.group.rank()); };
  for (const Owner& owner : ownership.owners) s.owners.push_back(to_rank(owner));
  for (const Owner& owner : ownership.owners_of_parts) s.owners_of_parts.push_back(to_rank(owner));
  for (const RowPart& part : s.parts) s.owners[part.parameter] = parallel::kRanksOfParts;
  s.copies = gathers ? 1 : static_cast<int>(hosts.ranks.size());
  const size_t most = s.options.reshard_after_forward ? s.options.max_gathered_units : s.units.size() + 1;
  std::optional<SharedParameters::OnDevice> on_device;
  if (device) on_device = {.device = *device, .units = s.units, .most = most};
  const auto fill = [&](const parallel::NamedTensor& parameter, const at::Tensor& values) {
    if (parameter.tensor.is_meta())
      s.options.init(parameter.name, values, generator_for(parameter.name, s.options.init_seed));
    else
      values.copy_(parallel::unwatched(parameter.tensor));
  };
  s.shared = std::make_shared<SharedParameters>(
      s.parameters, compute_dtypes, ownership, hosts, s.group, world,
      Gathering{.units = gathers ? s.units : std::vector<Unit>{}, .most = most}, fill, on_device);

  with.owner_on_each_host = s.copies > 1;
  if (gathers) with.most_in_flight = group_bytes;
  with.on_end = [shared = s.shared] { shared->own_reads_are_over(); };
  with.on_averaged = [shared = s.shared](bool) { shared->reads_are_over(); };
  std::vector<parallel::NamedTensor> trained;
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    if (!s.parameters[i].tensor.requires_grad()) continue;
    trained.push_back(s.parameters[i]);
    with.owners.push_back(s.owners[i]);
    auto& parts = with.parts.emplace_back();
    s.for_each_part_of(i, [&](size_t k) {
      parts.push_back({.range = s.parts[k].range, .tensor = s.shared->parts()[k], .owner = s.owners_of_parts[k]});
    });
  }
  with.reduce_dtypes = parallel::reduce_dtypes(*s.module, trained, precision);
  if (!trained.empty()) s.gradients.emplace(trained, std::move(with), world.shared_heap());
}

Sharder::~Sharder() {
  try {
    if (impl_) impl_->let_backward_end();
  } catch (const std::exception&) {  // the device has failed
  }
}

std::shared_ptr<void> Sharder::before_forward() {
  Impl& s = *impl_;
  s.let_backward_end();
  if (s.shared->has_all() && !s.module->is_training()) return s.forward();
  const bool makes_graph = at::GradMode::is_enabled();  // perhaps to train in eval() mode
  if (makes_graph) s.watch->check_for_new(*s.module);
  if (makes_graph && s.module->is_training() && s.gradients) s.gradients->require_no_other();
  auto changes = s.shared->changes(makes_graph);  // before anything that ends the others' reads
  if (s.gradients) s.gradients->before_forward();
  const bool sync = !s.gradients || s.gradients->sync();
  const bool may_follow_an_update = s.module->is_training() && sync;
  if (may_follow_an_update || !s.shared->may_go_on(changes)) s.shared->before_forward(std::move(changes));
  if (s.options.compute_device) move_buffers(s.buffers, *s.options.compute_device);
  if (sync && s.options.broadcast_buffers && s.module->is_training() && !s.buffers.empty())
    s.options.compute_device ? broadcast_from_devices(s.buffers, s.group)
                             : parallel::broadcast_together(s.buffers, s.group);
  return s.forward();
}

std::optional<at::ScalarType> Sharder::input_dtype() const {
  const MixedPrecision& precision = impl_->options.mixed_precision;
  return precision.cast_forward_inputs ? precision.param_dtype : std::nullopt;
}
std::optional<at::ScalarType> Sharder::output_dtype() const { return impl_->options.mixed_precision.output_dtype; }

void Sharder::synchronize() {
  impl_->end_backward();
  impl_->shared->synchronize();
}
void Sharder::gather() {
  impl_->end_backward();
  impl_->shared->gather();
}
size_t Sharder::bytes_here() const { return impl_->shared->bytes_here(); }
std::vector<size_t> Sharder::units_here() const { return impl_->shared->units_here(); }
std::vector<std::vector<std::string>> Sharder::unit_names() const {
  std::vector<std::vector<std::string>> names;
  for (const Unit& unit : impl_->units) {
    auto& list = names.emplace_back();
    for (const size_t i : unit) list.push_back(impl_->parameters[i].name);
  }
  return names;
}

bool Sharder::set_sync(bool on) { return !impl_->gradients || impl_->gradients->set_sync(on); }

int Sharder::owner(const at::Tensor& parameter) const {
  const Impl& s = *impl_;
  for (size_t k = 0; k < s.parts.size(); ++k)
    if (s.shared->parts()[k].is_same(parameter)) return s.owners_of_parts[k];
  for (size_t i = 0; i < s.parameters.size(); ++i) {
    if (!s.parameters[i].tensor.is_same(parameter)) continue;
    if (s.owners[i] == parallel::kRanksOfParts)
      throw InvalidArgument(text("parameter ", s.parameters[i].name, " is divided into rows, which have owners"),
                            "Ask for those that parameters() has");
    return s.owners[i];
  }
  throw InvalidArgument("the tensor is not a parameter of the sharded module");
}

std::vector<at::Tensor> Sharder::parameters() const {
  std::vector<at::Tensor> all;
  impl_->for_each_with_owner([&](const at::Tensor& parameter, int /*owner*/) { all.push_back(parameter); });
  return all;
}

std::vector<at::Tensor> Sharder::owned_parameters() const {
  std::vector<at::Tensor> owned;
  impl_->for_each_with_owner([&](const at::Tensor& parameter, int owner) {
    if (owner == impl_->group.rank()) owned.push_back(parameter);
  });
  return owned;
}

std::vector<std::vector<std::string>> Sharder::bucket_names() const {
  return impl_->gradients ? impl_->gradients->bucket_names() : std::vector<std::vector<std::string>>{};
}

double Sharder::clip_grad_norm(double max_norm, double norm_type, bool error_if_nonfinite) {
  impl_->end_backward();
  if (impl_->gradients) impl_->gradients->require_averages("clip_grad_norm_()");
  return clip_grad_norm_(owned_parameters(), max_norm,
                         {.norm_type = norm_type,
                          .error_if_nonfinite = error_if_nonfinite,
                          .sharded_over = impl_->group,
                          .copies = impl_->copies});  // hosts have the same gradients
}

}  // namespace muster::fsdp
