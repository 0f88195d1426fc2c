#include "rpc/agent/agent.h"

#include <algorithm>
#include <set>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/log.h"
#include "base/text.h"
#include "base/verbose.h"
#include "muster/base/error.h"
#include "muster/base/secret.h"
#include "rpc/kit/ways.h"
#include "shm/spin.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"

namespace muster::rpc {
namespace {

transport::Directory directory_of(const std::shared_ptr<Store>& store) {
  return {[store](const auto& key, const auto& value) { store->set(key, value); },
          [store](const auto& key, Deadline until) { return store->get(key, until); }};
}

// One table for each agent that ever existed. They stay reachable, so that a leak checker does not report them.
std::vector<WorkerInfo>& new_table() {
  static std::mutex mutex;
  static auto* const tables = new std::vector<std::unique_ptr<std::vector<WorkerInfo>>>;
  const std::lock_guard lock(mutex);
  return *tables->emplace_back(std::make_unique<std::vector<WorkerInfo>>());
}

}  // namespace

Agent::Agent(const World& world, Options options)
    : world_(world.parts()),
      options_(std::move(options)),
      self_(world.rank()),
      workers_(new_table()),
      objects_(world.rank(), world.world_size()) {
  next_tick_.store(kNever);
  interceptor_ = make_interceptor(*this);
  for (int rank = 0; rank < world.world_size(); ++rank) peers_.push_back(std::make_unique<Peer>());
}

// close() has been called. The last owner may be a thread of the agent's own pool, or another that must not wait, so
// the destructor waits for nothing.
Agent::~Agent() {
  if (executor_ && forked()) (void)executor_.release();
}

// --- the start ---

namespace {

// What each rank has set. TimeoutError names those that have not, and says what they have `not_done`.
std::vector<std::string> posted_by_all(Store& store, const std::string& prefix, size_t n, const char* not_done,
                                       Deadline deadline) {
  std::vector<std::string> posted;
  try {
    for (size_t rank = 0; rank < n; ++rank) posted.push_back(store.get(text(prefix, rank), deadline));
    return posted;
  } catch (const TimeoutError&) {
    std::vector<int> missing;
    for (size_t rank = 0; rank < n; ++rank)
      if (!store.try_get(text(prefix, rank))) missing.push_back(static_cast<int>(rank));
    if (missing.empty()) throw;
    const bool one = missing.size() == 1;
    throw TimeoutError(
        text("rpc::init(): ", one ? "rank " : "ranks ", join(missing), one ? " has" : " have", " not ", not_done),
        missing, "Every rank of the World must call rpc::init(); look at their output");
  }
}

}  // namespace

void Agent::start(const World& world) {
  // One proxy for each agent that ever existed. They stay reachable, so that a leak checker does not report them.
  static std::mutex proxies_mutex;
  static auto* const proxies = new std::vector<std::unique_ptr<Proxy>>;
  {
    const std::lock_guard lock(proxies_mutex);
    proxies->push_back(std::make_unique<Proxy>(weak_from_this()));
    proxy_ = proxies->back().get();
  }
  const auto store = world.shared_store();
  const auto deadline = Deadline::after(world_.options.timeout);
  // RPC may be started several times in one World: each time has its own keys.
  const int64_t time = store->add(text(world_.prefix, "/rpc/times/", self_), 1);
  const std::string prefix = text(world_.prefix, "/rpc/", time);
  const auto n = static_cast<size_t>(world.world_size());
  if (world_.members.size() != n)
    throw Unavailable("RPC needs ranks that exist", "The backend 'fake' has none; use another one");
  const std::string mine = options_.name.empty() ? text("worker", self_) : options_.name;
  const Ways ways = Ways::parse(options_.transport);
  // A '+' after the ways says that this worker has device maps.
  store->set(text(prefix, "/name/", self_), text(ways.text(), options_.device_maps.empty() ? " " : "+ ", mine));
  std::set<std::string> names;
  std::vector<bool> has_maps(n);
  std::vector<std::string> by_rank;
  const std::vector<std::string> all = posted_by_all(*store, text(prefix, "/name/"), n, "called it", deadline);
  for (size_t rank = 0; rank < n; ++rank) {
    const std::string& posted = all[rank];
    const auto space = posted.find(' ');
    std::string name = posted.substr(space + 1), its_ways = posted.substr(0, space);
    if ((has_maps[rank] = its_ways.ends_with('+'))) its_ways.pop_back();
    if (its_ways != ways.text())
      throw Mismatch(
          text("worker \"", name, "\" uses the transports ", its_ways, ", worker \"", mine, "\" ", ways.text()),
          "Give all workers the same Options::transport and MUSTER_RPC_TRANSPORT");
    if (!names.insert(name).second)
      throw InvalidArgument(text("two workers are named \"", name, "\""), "Give each rank its own name");
    workers_.push_back({.name = name, .id = static_cast<int>(rank), .host = world_.members[rank].host});
    by_rank.push_back(name);
    peers_[rank]->pid = world_.members[rank].pid;
  }

  devices_.meet(options_.device_maps, {.store = *store,
                                       .prefix = text(prefix, "/devices"),
                                       .deadline = deadline,
                                       .self = self_,
                                       .workers = workers_,
                                       .has_maps = has_maps});

  const int here = world_.members[static_cast<size_t>(self_)].host;
  std::vector<int> near, far;
  for (size_t rank = 0; rank < n; ++rank) {
    const bool same_host = world_.members[rank].host == here;
    const bool is_near = static_cast<int>(rank) == self_ || (ways.shm && same_host);
    (is_near ? near : far).push_back(static_cast<int>(rank));
    if (!is_near && ways.far.empty())
      throw Unavailable(text("worker \"", by_rank[rank], "\" is on another host"),
                        "Leave Options::transport at \"auto\"");
  }

  const auto directory = directory_of(store);
  std::vector<pid_t> pids;
  for (const int rank : near) pids.push_back(world_.members[static_cast<size_t>(rank)].pid);
  shm_ = transport::make_shm_transport(
      {.rank = self_,
       .workers = near,
       .names = by_rank,
       .pids = pids,
       .heap = world_.arena,
       .watch = world_.watch,
       .prefix = text(prefix, "/shm/", near.front())},
      {directory.post, directory.read, [store](const auto& key) { store->try_get(key); }}, *this, deadline);
  for (const int rank : near) peer(rank).way = shm_.get();
  executor_ = std::make_unique<Executor>(
      static_cast<Driver&>(*this), Executor::Options{.name = text("rpc ", self_),
                                                     .max_threads = options_.max_threads,
                                                     .spin = shm::spin_for(static_cast<int>(near.size()), world_.cores),
                                                     .cores = std::max(1, world_.cores / static_cast<int>(near.size())),
                                                     .in_thread =
                                                         [this](const std::function<void()>& body) {
                                                           const World::Scope scope(world_);
                                                           const detail::WaitsOfThread waits(proxy_);
                                                           body();
                                                         },
                                                     .on_idle = [this] { changed(); }});
  executor_->start();
  if (ways.far == "tcp" && !far.empty()) {
    transport::TcpOptions tcp{.rank = self_, .peers = far, .size = static_cast<int>(n), .names = by_rank};
    tcp.heartbeat = options_.heartbeat;
    tcp.secret = Secret::from_environment();
    tcp.prefix = text(prefix, "/tcp");
    far_ = transport::make_tcp_transport(tcp, directory, *this, deadline);
  } else if (!far.empty()) {
    transport::UcxOptions ucx{.rank = self_, .peers = far, .size = static_cast<int>(n), .names = by_rank};
    for (const int rank : far)
      if (world_.members[static_cast<size_t>(rank)].host == here) ucx.local.push_back(rank);
    ucx.watch = world_.watch;
    ucx.heartbeat = options_.heartbeat;
    // The transport's thread spins beside each worker's own thread if there are cores for all of them.
    const auto is_here = [here](const auto& worker) { return worker.host == here; };
    ucx.spin =
        shm::spin_for(2 * static_cast<int>(std::count_if(workers_.begin(), workers_.end(), is_here)), world_.cores);
    ucx.prefix = text(prefix, "/");
    far_ = transport::make_ucx_transport(ucx, directory, *this, deadline);
  }
  for (const int rank : far) peer(rank).way = far_.get();
  for (const auto& worker : workers_)  // workers that died before there was a way to say so
    if (peer(worker.id).lost.load())
      for (const auto& other : workers_) send_quietly(other.id, {.kind = MessageKind::kDrained, .worker = worker.id});
  // Nobody makes a call before all workers know their ways to all others.
  store->set(text(prefix, "/ready/", self_), "");
  posted_by_all(*store, text(prefix, "/ready/"), n, "got ready in it", deadline);
  if (env_string(kVerboseVariable) || log_level() <= LogLevel::kInfo) log_ways();
}

void Agent::log_ways() const {
  std::map<std::string_view, std::string> ways;
  for (const auto& worker : workers_) {
    std::string& names = ways[peer(worker.id).way.load()->name()];
    names += text(names.empty() ? "" : ", ", '"', worker.name, '"');
  }
  std::string line;
  for (const auto& [way, names] : ways) line += text(line.empty() ? "" : "; ", names, " over ", way);
  LogLine(LogLevel::kInfo).stream() << "rpc: \"" << self().name << "\" calls " << line;
}

const WorkerInfo& Agent::find(std::string_view name) const {
  for (const WorkerInfo& worker : workers_)
    if (worker.name == name) return worker;
  std::string all;
  for (const WorkerInfo& worker : workers_) all += text(all.empty() ? "" : ", ", '"', worker.name, '"');
  throw InvalidArgument(text("there is no worker \"", name, "\""), text("There are ", all));
}

const WorkerInfo& Agent::find(int rank) const {
  if (rank < 0 || static_cast<size_t>(rank) >= workers_.size())
    throw InvalidArgument(text("there is no worker ", rank), text("Use 0 … ", workers_.size() - 1));
  return workers_[static_cast<size_t>(rank)];
}

bool Agent::is_alive(int rank) const { return !peer(find(rank).id).lost.load(std::memory_order_acquire); }

Census Agent::census() const {
  Census census{.owned_objects = objects_.size()};
  {
    const std::lock_guard lock(pending_mutex_);
    census.pending_calls = pending_.size();
  }
  for (const auto& one : peers_) {
    const std::lock_guard lock(running_mutex_);
    census.running_handlers += one->running.size();
  }
  census.threads = static_cast<size_t>(executor_->threads());
  return census;
}

Traffic Agent::traffic() const {
  Traffic sum;
  for (const WorkerInfo& worker : workers_) {
    if (worker.id == self_) continue;
    const Peer& other = peer(worker.id);
    sum.calls += other.calls.load(std::memory_order_relaxed);
    sum.bytes_sent += other.sent.load(std::memory_order_relaxed);
    sum.bytes_received += other.received.load(std::memory_order_relaxed);
  }
  return sum;
}

void Agent::check_fork() const {
  if (forked()) throw Aborted("RPC belongs to the process that this one was forked from");
}

}  // namespace muster::rpc
