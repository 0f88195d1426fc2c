#include "muster/comm/world.h"

#include <unistd.h>

#include <algorithm>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <set>
#include <system_error>
#include <thread>
#include <typeindex>

#include "base/crash_report.h"
#include "base/cycles.h"
#include "base/env.h"
#include "base/fork_count.h"
#include "base/log.h"
#include "base/text.h"
#include "comm/backends/registry.h"
#include "comm/world/group_state.h"
#include "comm/world/heaps.h"
#include "comm/world/job_environment.h"
#include "comm/world/meeting.h"
#include "comm/world/thread_pool.h"
#include "comm/world/world_parts.h"
#include "comm/world/world_starter.h"
#include "muster/base/error.h"
#include "muster/comm/report_progress.h"
#include "shm/arena.h"
#include "shm/black_box.h"
#include "shm/peer_watch.h"

namespace muster {

struct World::State : World::Parts {
  World* self = nullptr;
  std::shared_ptr<Store> store;
  std::shared_ptr<Heap> heap;
  std::vector<std::shared_ptr<shm::Mapping>> heaps;  // by global rank; null for ranks of other hosts
  std::shared_ptr<shm::BlackBox> black_box;
  std::mutex groups_mutex;                          // guards the next two members, which abort() needs
  std::vector<std::weak_ptr<Group::State>> groups;  // the groups that have handles; the default group first
  std::optional<std::string> aborted;               // why
  const std::shared_ptr<LingeringGroups> lingering = std::make_shared<LingeringGroups>();
  Group group;
  mutable std::mutex components_mutex;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> components;
  uint64_t next_group = 0;
  std::string cause;  // the error by which this rank ends; empty: it ends as intended
  pid_t pid = ::getpid();
  bool ranks_are_threads = false;
  std::string host;  // of this rank; empty: it finds out

  // `shown_ranks`: how its errors number the ranks; empty: as the group does.
  std::shared_ptr<Group::State> make_group(const std::string& name, const std::string& store_prefix,
                                           const std::vector<int>& ranks, const std::vector<int>& shown_ranks = {},
                                           const GroupOptions& with = {});
  void meet(Deadline deadline);
  void leave();
  std::vector<std::shared_ptr<Group::State>> alive_groups();
};

namespace {

thread_local World::State* current_world = nullptr;

FaultPlan faults_of_environment() { return FaultPlan::parse(env_string("MUSTER_FAULTS").value_or("")); }

}  // namespace

// The ranks tell each other who they are; those of one host exchange their heaps.
void World::State::meet(Deadline deadline) {
  const auto n = static_cast<size_t>(placement.world_size);
  if (!comm::find_backend(options.backend, true).needs_peers) {
    members.resize(n);
    heaps.resize(n);
    return;
  }
  members = comm::meet_members(*store, prefix, placement.rank, placement.world_size,
                               host.empty() ? comm::host_identity() : host, deadline);
  cores = comm::cores_of_host(members, placement.rank);
  if (!comm::find_backend(options.backend, comm::on_one_host(members)).maps_heaps)
    heaps.resize(n);
  else
    heaps = comm::exchange_memory(*store, prefix + "/heaps", placement.rank, members, arena->fd(), deadline);
}

std::shared_ptr<Group::State> World::State::make_group(const std::string& name, const std::string& store_prefix,
                                                       const std::vector<int>& ranks,
                                                       const std::vector<int>& shown_ranks, const GroupOptions& with) {
  lingering->end_idle();
  const std::shared_ptr<Group::State> group(new Group::State,
                                            [lingering = lingering, forks = fork_count()](Group::State* state) {
                                              // In a fork, the membership and the threads belong to the parent.
                                              if (forks == fork_count())
                                                lingering->take(std::unique_ptr<Group::State>(state));
                                            });
  group->ranks = ranks;
  group->shown_ranks = shown_ranks;
  group->name = name;
  group->store_prefix = store_prefix;
  group->make_group = [this](const auto&... arguments) { return Group(make_group(arguments...)); };
  const std::string& backend = with.backend.empty() ? options.backend : with.backend;
  const auto mine = std::find(ranks.begin(), ranks.end(), placement.rank);
  if (mine != ranks.end()) {
    group->rank = static_cast<int>(mine - ranks.begin());
    comm::BackendContext context{.group = {.name = name,
                                           .store_prefix = store_prefix,
                                           .store = store,
                                           .rank = group->rank,
                                           .size = static_cast<int>(ranks.size()),
                                           .timeout = with.timeout.count() > 0 ? with.timeout : options.timeout,
                                           .global_ranks = ranks,
                                           .shown_ranks = shown_ranks},
                                 .host = {.arena = arena,
                                          .watch = watch,
                                          .black_box = black_box,
                                          .ranks_are_threads = ranks_are_threads,
                                          .local_ranks = placement.local_world_size,
                                          .cores = cores},
                                 .options = {.faults = options.faults}};
    std::set<int> hosts;
    for (const int rank : ranks) {
      context.host.heaps.push_back(heaps[static_cast<size_t>(rank)]);
      context.group.members.push_back(members[static_cast<size_t>(rank)]);
      hosts.insert(context.group.members.back().host);
    }
    if (!heaps[static_cast<size_t>(placement.rank)]) context.host.heaps.clear();  // the World's backend maps none
    group->backend = comm::create_backend(backend, context);
    MUSTER_LOG(kInfo) << "rank " << placement.rank << ": group '" << name << "' of " << ranks.size() << " ranks on "
                      << hosts.size() << (hosts.size() == 1 ? " host" : " hosts") << " uses backend '"
                      << group->backend->getBackendName() << "'" << (backend == "auto" ? ", chosen by auto" : "");
  }
  std::optional<std::string> why;
  {
    const std::lock_guard lock(groups_mutex);
    std::erase_if(groups, [](const auto& other) { return other.expired(); });
    groups.push_back(group);
    why = aborted;
  }
  if (why && group->backend) group->backend->fail(Aborted(*why));
  return group;
}

void World::State::leave() {
  const auto released = lingering->all();
  std::vector<Group::State*> all;
  for (const auto& state : released) all.push_back(state.get());
  const auto alive = alive_groups();
  // The default group last: it is the one in which the peers learn the cause.
  for (auto state = alive.rbegin(); state != alive.rend(); ++state) all.push_back(state->get());
  for (Group::State* const state : all) {
    state->world_has_left = true;
    if (state->backend) state->backend->warn_of_straggler();
  }
  for (Group::State* const state : all)
    if (state->backend) state->backend->leave(cause);
}

std::vector<std::shared_ptr<Group::State>> World::State::alive_groups() {
  std::vector<std::shared_ptr<Group::State>> alive;
  const std::lock_guard lock(groups_mutex);
  for (const auto& each : groups)
    if (auto state = each.lock()) alive.push_back(std::move(state));
  return alive;
}

World::World(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options)
    : World(placement, std::move(store), options, false, {}) {}

World::World(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options, bool ranks_are_threads,
             const std::string& host)
    : state_(std::make_unique<State>()) {
  if (placement.world_size < 1)
    throw InvalidArgument(text("the number of ranks: expected 1 or more, got ", placement.world_size));
  if (placement.rank < 0 || placement.rank >= placement.world_size)
    throw InvalidArgument(text("rank: expected 0 to ", placement.world_size - 1, " in a world of ",
                               placement.world_size, ", got ", placement.rank),
                          text("Use 0 … ", placement.world_size - 1));
  if (!store)
    throw InvalidArgument("a World needs a store",
                          "Use make_memory_store() for ranks that are threads, or connect_store()");
  comm::renew_thread_pool();
  State& s = *state_;
  s.self = this;
  FastClock::now();  // the first call starts the measurement of a cycle's length
  s.placement = placement;
  s.ranks_are_threads = ranks_are_threads;
  s.host = host;
  s.options = options;
  const FaultPlan more = faults_of_environment();
  for (const Fault& fault : more.faults()) s.options.faults.add(fault);
  s.store = std::move(store);
  // A process may leave a job's World and make another. Each World has its own prefix in the store.
  s.prefix = text("muster/world/", s.store->add(text("muster/worlds/", placement.rank), 1));
  s.black_box = shm::open_black_box(placement.rank, placement.world_size, ranks_are_threads);
  s.arena = std::make_shared<shm::Arena>(options.heap_capacity ? options.heap_capacity
                                                               : comm::default_heap_capacity(placement.world_size));
  s.heap = comm::make_heap(s.arena);
  s.meet(Deadline::after(options.timeout));
  std::vector<int> everybody(static_cast<size_t>(placement.world_size));
  for (size_t i = 0; i < everybody.size(); ++i) everybody[i] = static_cast<int>(i);
  s.group = Group(s.make_group("world", s.prefix + "/world", everybody));
}

World::World(World&& other) noexcept : state_(std::move(other.state_)) {
  if (state_) state_->self = this;
}

World& World::operator=(World&& other) noexcept {
  if (this != &other) {
    World gone(std::move(*this));
    state_ = std::move(other.state_);
    if (state_) state_->self = this;
  }
  return *this;
}

World::~World() {
  if (!state_) return;
  if (current_world == state_.get()) current_world = nullptr;
  if (state_->pid != ::getpid()) {
    // This is a fork of the rank: the membership and the threads belong to the parent.
    (void)state_.release();
    return;
  }
  for (;;) {
    std::shared_ptr<void> last;  // destroyed without the lock
    {
      const std::lock_guard lock(state_->components_mutex);
      if (state_->components.empty()) break;
      last = std::move(state_->components.back().second);
      state_->components.pop_back();
    }
  }
  state_->leave();
}

const World::Parts& World::parts() const { return *state_; }

void World::attach(const std::type_info& type, std::shared_ptr<void> component) {
  if (find(type)) throw InvalidArgument("the World already has a component of this type");
  const std::lock_guard lock(state_->components_mutex);
  state_->components.emplace_back(type, std::move(component));
}

std::shared_ptr<void> World::find(const std::type_info& type) const {
  const std::lock_guard lock(state_->components_mutex);
  for (const auto& [known, component] : state_->components)
    if (known == type) return component;
  return nullptr;
}

void World::detach(const std::type_info& type) {
  std::shared_ptr<void> gone;  // ends without the lock
  const std::lock_guard lock(state_->components_mutex);
  for (auto it = state_->components.begin(); it != state_->components.end(); ++it)
    if (it->first == type) {
      gone = std::move(it->second);
      state_->components.erase(it);
      return;
    }
}

int World::rank() const { return state_->placement.rank; }
int World::world_size() const { return state_->placement.world_size; }
int World::local_rank() const { return state_->placement.local_rank; }
int World::local_world_size() const { return state_->placement.local_world_size; }
int World::node_rank() const { return state_->placement.node_rank; }
const Group& World::group() const { return state_->group; }

void World::abort(const std::string& why) noexcept {
  try {
    {
      const std::lock_guard lock(state_->groups_mutex);
      state_->aborted = why;
    }
    const Aborted error(why);
    for (const auto& group : state_->alive_groups()) try {
        if (group->backend) group->backend->fail(error);
      } catch (const std::exception& failed) {
        MUSTER_LOG(kError) << "rank " << state_->placement.rank << " cannot abort a group: " << failed.what();
      }
    state_->lingering->abort(why);
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "rank " << state_->placement.rank << " cannot abort its groups: " << error.what();
  }
}

Store& World::store() const { return *state_->store; }
std::shared_ptr<Store> World::shared_store() const { return state_->store; }
Heap& World::heap() const { return *state_->heap; }
std::shared_ptr<Heap> World::shared_heap() const { return state_->heap; }

Group World::new_group(const std::vector<int>& ranks, const GroupOptions& options) {
  if (ranks.empty()) throw InvalidArgument("a group needs at least one rank");
  const std::set<int> unique(ranks.begin(), ranks.end());
  if (unique.size() != ranks.size() || *unique.begin() < 0 || *unique.rbegin() >= world_size())
    throw InvalidArgument(text("ranks: expected different ones from 0 to ", world_size() - 1, " of a world of ",
                               world_size(), ", got [", join(ranks), "]"),
                          text("Use each of 0 … ", world_size() - 1, " at most once"));
  const auto numbered = text("group ", ++state_->next_group);
  return Group(state_->make_group(options.name.empty() ? numbered : options.name, text(state_->prefix, '/', numbered),
                                  ranks, options.parents_ranks ? ranks : std::vector<int>(), options));
}

World* World::current_or_null() { return current_world ? current_world->self : nullptr; }

World& World::current() {
  if (World* const world = current_or_null()) return *world;
  throw Aborted("this thread has no World", "Call muster::init() in it, or make a World current with World::Scope");
}

World::Scope::Scope(World& world) : previous_(std::exchange(current_world, world.state_.get())) {}
World::Scope::Scope(const Parts& world)
    : previous_(std::exchange(current_world, static_cast<State*>(const_cast<Parts*>(&world)))) {}
World::Scope::~Scope() { current_world = static_cast<State*>(previous_); }

void report_progress(const TrainingProgress& progress) noexcept {
  if (!current_world || !current_world->black_box) return;
  const auto told = [](int64_t number) {
    return number < 0 ? std::nullopt : std::optional(static_cast<uint64_t>(number));
  };
  current_world->black_box->report(told(progress.step), told(progress.samples));
}

World comm::WorldStarter::make(const Placement& placement, std::shared_ptr<Store> store, const WorldOptions& options,
                               bool ranks_are_threads) const {
  return {placement, std::move(store), options, ranks_are_threads,
          hosts_.empty() ? std::string() : hosts_.at(static_cast<size_t>(placement.rank))};
}

World comm::WorldStarter::join(Placement placement, std::shared_ptr<Store> store, const WorldOptions& options) const {
  return make(placement, std::move(store), options, false);
}

World comm::WorldStarter::init(const WorldOptions& options) const {
  faults_of_environment();  // finds a mistake in them before this rank waits for others
  JoinedJob job = join_job(Deadline::after(options.timeout));
  if (job.started_by == "muster run") install_crash_report();  // the launcher finds the names
  World world = join(job.placement, std::move(job.store), options);
  current_world = world.state_.get();
  return world;
}

namespace {

// Whether an exception only says that another rank has ended.
bool is_echo(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& e) {
    return e.code() == ErrorCode::kPeerLost || e.code() == ErrorCode::kAborted;
  } catch (...) {
    return false;
  }
}

std::string what(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace

World init(const WorldOptions& options) { return comm::WorldStarter().init(options); }

void run_threads(int n, const std::function<void(World&)>& fn, const WorldOptions& options) {
  comm::WorldStarter().run_threads(n, fn, options);
}

void comm::WorldStarter::run_threads(int n, const std::function<void(World&)>& fn, const WorldOptions& options) const {
  if (n < 1) throw InvalidArgument(text("run_threads(): the number of ranks: expected 1 or more, got ", n));
  const auto store = make_memory_store();
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  const auto be_rank = [&](int rank) {
    try {
      World world =
          make({.rank = rank, .world_size = n, .local_rank = rank, .local_world_size = n}, store, options, true);
      const World::Scope scope(world);
      try {
        fn(world);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
        world.state_->cause = what(errors[static_cast<size_t>(rank)]);
      }
    } catch (...) {
      errors[static_cast<size_t>(rank)] = std::current_exception();
    }
  };
  // None begins before all have a thread: the others would wait for it.
  std::promise<bool> all_there;
  const std::shared_future<bool> goes = all_there.get_future().share();
  std::vector<std::thread> threads;
  std::string why;
  try {
    for (int rank = 0; rank < n; ++rank)
      threads.emplace_back([&, rank] {
        if (goes.get()) be_rank(rank);
      });
  } catch (const std::system_error& error) {
    why = error.what();
  }
  all_there.set_value(why.empty());
  for (auto& thread : threads) thread.join();
  if (!why.empty())
    throw Unavailable(text("run_threads(): no thread for rank ", threads.size(), " of ", n, ": ", why),
                      "Use fewer ranks, or raise the limit of processes (ulimit -u, pids.max)");
  std::exception_ptr first;
  for (const auto& error : errors)
    if (error && (!first || (is_echo(first) && !is_echo(error)))) first = error;
  if (first) std::rethrow_exception(first);
}

}  // namespace muster
