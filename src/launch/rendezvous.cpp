#include "launch/rendezvous.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "launch/outcome.h"
#include "launch/patient_store.h"
#include "muster/base/error.h"
#include "store/erase_all.h"
#include "store/outage.h"
#include "store/stored_number.h"

namespace muster::launch {
namespace {

using Json = nlohmann::json;
using std::chrono::milliseconds;

constexpr int64_t kSeats = 1 << 16;      // more than any job has agents
constexpr milliseconds kLook{50};        // between two looks at the agents that have come
constexpr milliseconds kFarewell{3000};  // the time in which the other agents may learn of the job's end
constexpr milliseconds kGoing{1000};     // the time in which an agent that leaves gives back its seat or says why
// If two agents want the same number: an agent is dead after kDead looks without a beat, and lives after kAlive looks
// that saw one.
constexpr int kDead = 20, kAlive = 3;

constexpr const char* kEnded = "ended";  // the job's only key after its end

std::string key(int epoch, const std::string& name) { return text("agents/", epoch, '/', name); }

Json to_json(const Agent& agent) {
  return {{"host", agent.host},         {"ranks", agent.ranks},
          {"wish", agent.wish},         {"was", agent.was},
          {"port", agent.master_port},  {"identity", agent.identity},
          {"restarts", agent.restarts}, {"max_restarts", agent.max_restarts},
          {"line", agent.line},         {"seat", agent.seat},
          {"done", agent.done}};
}

Agent agent_of(const Json& json) {
  return {.host = json.at("host"),
          .ranks = json.at("ranks"),
          .wish = json.at("wish"),
          .was = json.at("was"),
          .master_port = json.at("port"),
          .restarts = json.at("restarts"),
          .max_restarts = json.at("max_restarts"),
          .line = json.at("line"),
          .done = json.at("done"),
          .seat = json.at("seat"),
          .identity = json.at("identity")};
}

// Reads what another agent wrote. Throws Corrupt if no agent can have written it.
template <typename Read>
auto parse(const std::string& name, const std::string& value, Read read) {
  try {
    return read(Json::parse(value));
  } catch (const Json::exception& error) {
    throw Corrupt(text("the job's store has a value at '", name, "' that no agent wrote: ", error.what()),
                  "Run the same version of Muster on all hosts, and one job per store and --job-id");
  }
}

// Runs a wait; nullopt if it ends with Timeout.
template <typename Wait>
auto unless_late(Wait wait) -> std::optional<decltype(wait())> {
  try {
    return wait();
  } catch (const Timeout&) {
    return std::nullopt;
  }
}

EpochEnd end_in(const Json& json) {
  return {.kind = json.at("kind").get<EpochEnd::Kind>(),
          .node = json.at("node"),
          .status = json.at("status"),
          .cause = json.at("cause"),
          .last = json.at("last")};
}

std::string to_string(const EpochEnd& end) {
  const Json json = {
      {"kind", end.kind}, {"node", end.node}, {"status", end.status}, {"cause", end.cause}, {"last", end.last}};
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Sorts the agents by node number. If any agent asks for a number, these wishes decide. Otherwise each agent keeps its
// number if there still is one like it, and the others take the free numbers.
void put_in_order(std::vector<Agent>& agents) {
  const bool wishes = std::any_of(agents.begin(), agents.end(), [](const Agent& agent) { return agent.wish >= 0; });
  const auto place = [&](const Agent& agent) {
    const int number = wishes ? agent.wish : agent.was;
    return number < 0 ? std::numeric_limits<int>::max() : number;
  };
  std::stable_sort(agents.begin(), agents.end(), [&](const Agent& a, const Agent& b) { return place(a) < place(b); });
  for (size_t i = 0; wishes && i + 1 < agents.size(); ++i)
    if (agents[i].wish >= 0 && agents[i].wish == agents[i + 1].wish)
      throw InvalidArgument(text("the agents on '", agents[i].host, "' and '", agents[i + 1].host,
                                 "' both want to be node ", agents[i].wish),
                            "Give each host its own --node-rank, or none any");
  if (wishes) return;
  std::vector<std::optional<Agent>> places(agents.size());
  std::vector<Agent> others;
  for (auto& agent : agents) {
    const auto was = static_cast<size_t>(place(agent));
    if (was < places.size() && !places[was])
      places[was] = std::move(agent);
    else
      others.push_back(std::move(agent));
  }
  auto next = others.begin();
  for (size_t i = 0; i < places.size(); ++i) agents[i] = places[i] ? *std::move(places[i]) : std::move(*next++);
}

}  // namespace

int Plan::first_rank() const {
  int first = 0;
  for (int i = 0; i < node; ++i) first += agents[static_cast<size_t>(i)].ranks;
  return first;
}

int Plan::world_size() const {
  int size = 0;
  for (const auto& agent : agents) size += agent.ranks;
  return size;
}

int Plan::restarts() const {
  int restarts = 0;
  for (const auto& agent : agents) restarts = std::max(restarts, agent.restarts);
  return restarts;
}

int Plan::max_restarts() const {
  int most = std::numeric_limits<int>::max();
  for (const auto& agent : agents) most = std::min(most, agent.max_restarts);
  return most;
}

int Plan::line() const {
  int newest = -1;
  for (const auto& agent : agents) newest = std::max(newest, agent.line);
  return newest < 0 ? epoch : newest;
}

Rendezvous::Rendezvous(std::shared_ptr<Store> store, Agent self, const RendezvousOptions& options)
    : options_(options),
      bare_(std::move(store)),
      store_(patient(bare_)),
      self_(std::move(self)),
      events_fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!events_fd_) throw_errno("cannot make an event descriptor");
  thread_ = start_thread("muster-agents", [this] { work(); });
}

Rendezvous::~Rendezvous() {
  leave();
  thread_.join();
}

// --- the supervisor's side ---

std::optional<Rendezvous::Event> Rendezvous::next_event() {
  const std::lock_guard lock(mutex_);
  if (events_.empty()) {
    uint64_t count = 0;
    [[maybe_unused]] const auto bytes = ::read(events_fd_.get(), &count, sizeof count);
    return std::nullopt;
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Rendezvous::post(Event event) {
  const std::lock_guard lock(mutex_);
  events_.push_back(std::move(event));
  const uint64_t one = 1;
  [[maybe_unused]] const auto bytes = ::write(events_fd_.get(), &one, sizeof one);
}

void Rendezvous::end(EpochEnd end) {
  const std::lock_guard lock(mutex_);
  to_write_ = std::move(end);
  if (!wanted_since_) wanted_since_ = Clock::now();
  changed_.notify_all();
}

void Rendezvous::stop(int signal) {
  const std::lock_guard lock(mutex_);
  to_stop_ = signal;
  if (!stopped_since_) stopped_since_ = Clock::now();
  changed_.notify_all();
}

void Rendezvous::done() {
  const std::lock_guard lock(mutex_);
  done_ = true;
  if (!wanted_since_) wanted_since_ = Clock::now();
  changed_.notify_all();
}

void Rendezvous::leave() {
  const std::lock_guard lock(mutex_);
  stop_ = true;
  changed_.notify_all();
}

void Rendezvous::meet_again(int restarts, int master_port, int line, bool done) {
  const std::lock_guard lock(mutex_);
  again_ = true;
  restarts_ = restarts;
  master_port_ = master_port;
  line_ = line;
  were_done_ = done;
  changed_.notify_all();
}

// --- the store's silence ---

std::shared_ptr<Store> Rendezvous::patient(std::shared_ptr<Store> store) {
  const auto still = std::max(kStillFor, 2 * options_.patience);
  const bool again = store::comes_again(*store);
  // PatientStore repeats a call that got no answer, and bears_silence() looks in between whether the supervisor has
  // something to say. So such a call ends sooner than one that is not repeated.
  store::set_call_timeout(*store, again ? std::max(options_.patience, milliseconds(1000)) : still);
  if (!again) return store;
  return std::make_shared<PatientStore>(
      std::move(store), [this](const Error& error) { return bears_silence(error); }, [this] { heard(); });
}

bool Rendezvous::bears_silence(const Error& error) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    const auto now = Clock::now();
    first = !silent_since_;
    if (first) silent_since_ = now;
    const auto over = [&](const std::optional<Clock::time_point>& since, int times) {
      return since && now - std::max(*since, *silent_since_) > times * options_.patience;
    };
    if (stop_ || over(stopped_since_, kStopTakes) || over(meeting_ ? silent_since_ : wanted_since_, kNeeded))
      return false;
  }
  if (first) {
    ++outages_;
    post(StoreSilence{error.message()});
  }
  return true;
}

void Rendezvous::heard() {
  {
    const std::lock_guard lock(mutex_);
    if (!std::exchange(silent_since_, std::nullopt)) return;
  }
  post(StoreSilence{});
}

// --- the thread's side ---

bool Rendezvous::stopping() const {
  const std::lock_guard lock(mutex_);
  return stop_;
}

void Rendezvous::work() {
  std::exception_ptr error;
  try {
    take_part();
  } catch (...) {
    error = std::current_exception();
  }
  // Within the catch, this thread would still hold the exception while the supervisor reads it.
  if (error) post(std::move(error));
}

void Rendezvous::take_part() {
  for (int epoch = 0; auto plan = join(&epoch); ++epoch) {
    self_.was = plan->node;
    before_ = plan->agents.size();
    {
      const std::lock_guard lock(mutex_);
      meeting_ = false;
    }
    post(*plan);
    if (plan->node == 0) sweep_before(*plan);
    auto end = run(*plan);
    if (!end) return;
    const bool last = end->last;
    expected_.clear();
    if (end->kind == EpochEnd::Kind::kFailed)
      for (const auto& agent : plan->agents) expected_.push_back(agent.identity);
    post(*end);
    if (last) {
      await_others(*plan);
      return sweep(*plan, *end);
    }
    if (!ask_again()) return tell_stop(epoch + 1);
  }
}

// Waits until the supervisor calls meet_again() or leave(). Returns whether there is another epoch.
bool Rendezvous::ask_again() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return stop_ || again_; });
  self_.restarts = restarts_;
  self_.master_port = master_port_;
  self_.line = line_;
  self_.done = were_done_;
  again_ = done_ = false;
  meeting_ = true;
  to_write_.reset();
  wanted_since_.reset();
  return !stop_;
}

std::optional<EpochEnd> Rendezvous::end_of(int epoch, milliseconds wait) const {
  const std::string name = key(epoch, "end");
  const auto found = unless_late([&] { return store_->get(name, Deadline::after(wait)); });
  return found ? std::optional(parse(name, *found, end_in)) : std::nullopt;
}

// Whether the job has ended and only kEnded is left of it. If so, posts the end that is stored there.
bool Rendezvous::has_ended() {
  const auto found = store_->try_get(kEnded);
  if (found) post(parse(kEnded, *found, end_in));
  return found.has_value();
}

void Rendezvous::write_end(int epoch, const EpochEnd& end) {
  store_->compare_set(key(epoch, "end"), std::nullopt, to_string(end));
}

// Erases those keys of the epochs before `plan` that no agent reads once `plan` exists.
void Rendezvous::sweep_before(const Plan& plan) {
  for (; swept_ < plan.epoch; ++swept_) {
    for (const char* part : {"seat", "beat/", "done"})
      if (!store::erase_all(*store_, key(swept_, part))) return;
    for (const char* name : {"stop", "seen", "gone"}) store_->erase(key(swept_, name));
    // The ranks of an older line have ended: all their keys go. The ranks of the plan's line stay: only what they wrote
    // for that epoch goes.
    store::erase_all(*store_, swept_ < plan.line() ? text("ranks/", swept_, '/')
                                                   : text("ranks/", plan.line(), "/elastic/epochs/", swept_, '/'));
  }
}

// Waits until the supervisor calls leave(). The last agent to come here erases the job's keys and writes kEnded.
void Rendezvous::sweep(const Plan& plan, const EpochEnd& end) {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return stop_; });
  }
  try {
    if (!dynamic_cast<store::EraseAll*>(bare_.get())) return;
    // Not through store_, which may repeat a call. If an agent counted twice, the keys would be erased before the last
    // agent has read the end.
    if (bare_->add(key(plan.epoch, "gone"), 1) < static_cast<int64_t>(plan.agents.size())) return;
    bare_->set(kEnded, to_string(end));
    store::erase_all(*bare_, "agents/");
    store::erase_all(*bare_, "ranks/");
  } catch (const Error&) {  // the server of the store has gone, and so have the keys
  }
}

std::optional<Plan> Rendezvous::plan_of(int epoch, milliseconds wait) const {
  const std::string name = key(epoch, "plan");
  const auto found = unless_late([&] { return store_->get(name, Deadline::after(wait)); });
  if (!found) return std::nullopt;
  Plan plan = parse(name, *found, [&](const Json& json) {
    Plan read{.epoch = epoch, .node = -1};
    for (const auto& agent : json) read.agents.push_back(agent_of(agent));
    return read;
  });
  for (size_t i = 0; i < plan.agents.size(); ++i)
    if (plan.agents[i].identity == self_.identity) plan.node = static_cast<int>(i);
  return plan;
}

// Called when the job has ended: waits until all agents have read that, or for kFarewell. The agent that serves the
// store must not end earlier.
void Rendezvous::await_others(const Plan& plan) {
  const std::string name = key(plan.epoch, "seen");
  auto seen = store_->add(name, 1);
  for (const auto patience = Deadline::after(kFarewell); seen < static_cast<int64_t>(plan.agents.size());) {
    const auto more = unless_late([&] { return store_->watch(name, 0, Deadline::after(milliseconds(1))); });
    seen = more && more->value ? store::stored_number(name, *more->value, 0, INT64_MAX) : seen;
    if (patience.passed()) return;
    if (seen < static_cast<int64_t>(plan.agents.size())) ::poll(nullptr, 0, 5);
  }
}

// --- beats ---

void Rendezvous::beat(int epoch) {
  if (!next_beat_.passed()) return;
  next_beat_ = Deadline::after(kBeat);
  store_->add(key(epoch, text("beat/", self_.seat)), 1);
}

// Whether the agent of that seat lives: false if its beat has stood still for `patience`. The caller looks every
// `between`. The looks are counted instead of the time, so no agent counts as lost because the store did not answer.
// After such a silence every agent has `patience` to reach the store again, and then `patience` to beat.
bool Rendezvous::beats(int epoch, int64_t seat, Pulse* pulse, milliseconds between) const {
  const auto now = store_->try_get(key(epoch, text("beat/", seat)));
  if (std::exchange(pulse->outages, outages_) != outages_)
    pulse->still = -static_cast<int>(options_.patience / between);
  pulse->seen = pulse->seen || (pulse->last && now != pulse->last);
  pulse->still = now != pulse->last ? 0 : pulse->still + 1;
  pulse->last = now;
  return pulse->still * between < options_.patience;
}

// --- a stop between two epochs ---

// The signal with which the user has ended the job in this epoch.
std::optional<int> Rendezvous::stop_of(int epoch) const {
  const std::string name = key(epoch, "stop");
  const auto said = store_->try_get(name);
  if (!said) return std::nullopt;
  return static_cast<int>(store::stored_number(name, *said, 1, 64));
}

// Whether the user has ended the job before there was a plan for `epoch`. If so, posts a StopRequest.
bool Rendezvous::hears_stop(int epoch) {
  const auto stop = stop_of(epoch);
  if (!stop) return false;
  const int signal = *stop;
  {
    const std::lock_guard lock(mutex_);
    to_stop_ = signal;
  }
  post(StopRequest{signal});
  return true;
}

// If the user has ended the job: tells the other agents so in `epoch`, which has no plan yet or has just got one. Waits
// for them to read it, and sweeps, as after a last end.
void Rendezvous::tell_stop(int epoch) {
  int signal = 0;
  {
    const std::lock_guard lock(mutex_);
    signal = to_stop_;
  }
  if (signal == 0 || self_.was < 0) return;  // an agent that never had a place tells no other agent
  {
    const store::CallsBy soon(Deadline::after(kGoing));
    store_->compare_set(key(epoch, "stop"), std::nullopt, text(signal));
  }
  const Plan nobodys{.epoch = epoch, .agents = std::vector<Agent>(before_)};
  await_others(nobodys);
  const Outcome why = describe_stop(signal);
  sweep(nobodys,
        {.kind = EpochEnd::Kind::kStopped, .node = self_.was, .status = why.status, .cause = why.cause, .last = true});
}

// --- joining ---

// Takes a seat in the first epoch from *epoch on that has room. Returns nullopt if this rendezvous has to stop, or if
// the job has ended; then that end has been posted.
std::optional<Plan> Rendezvous::join(int* epoch) {
  for (;; ++*epoch) {
    if (has_ended()) return std::nullopt;
    auto plan = plan_of(*epoch, milliseconds(0));
    if (!plan) {
      self_.seat = store_->add(key(*epoch, "seats"), 1);
      next_beat_ = Deadline::after(milliseconds(0));
      beat(*epoch);
      const std::string seat = key(*epoch, text("seat/", self_.seat));
      store_->set(seat, to_json(self_).dump());
      const auto go = [&] {  // gives back the seat; if that fails, the others notice later that it does not beat
        const store::CallsBy soon(Deadline::after(kGoing));
        store_->erase(seat);
      };
      try {
        plan = await_plan(*epoch, Deadline::after(options_.timeout));
      } catch (...) {
        go();
        throw;
      }
      if (!plan) {
        go();
        return std::nullopt;
      }
    }
    if (plan->node >= 0) return plan;
    // This epoch has a plan without us. If it has room for one more agent, end it: then the agents meet again, with us.
    // Otherwise wait until it ends.
    if (static_cast<int>(plan->agents.size()) < options_.most && !store_->try_get(key(*epoch, "done")))
      write_end(*epoch, {.kind = EpochEnd::Kind::kRoom, .cause = text("an agent on '", self_.host, "' joins the job")});
    if (!await_room(*plan)) return std::nullopt;
  }
}

// Waits until the epoch of `plan`, which has no place for us, ends. Returns false if the job ends with it, or if we
// have to stop.
bool Rendezvous::await_room(const Plan& plan) {
  std::vector<Pulse> pulses(plan.agents.size());
  for (;;) {
    if (auto end = end_of(plan.epoch, kBeat)) {
      if (end->last) post(*std::move(end));
      return !end->last;
    }
    if (stopping() || has_ended()) return false;
    bool any = false;
    for (size_t i = 0; i < pulses.size(); ++i) any = beats(plan.epoch, plan.agents[i].seat, &pulses[i]) || any;
    if (!any)
      write_end(plan.epoch,
                {.kind = EpochEnd::Kind::kLost, .status = 1, .cause = "no agent of the job gave a sign of life"});
  }
}

std::optional<Plan> Rendezvous::await_plan(int epoch, Deadline deadline) {
  size_t seen = 0;
  std::vector<Agent> here;  // agents that have a seat, have written their Agent, and beat
  auto quiet = Deadline::never();
  std::map<int64_t, Pulse> pulses;
  for (;;) {
    if (auto plan = plan_of(epoch, kLook)) return plan;
    if (hears_stop(epoch) || stopping()) {
      tell_stop(epoch);
      return std::nullopt;
    }
    if (const auto end = end_of(epoch, milliseconds(0))) {
      if (end->kind != EpochEnd::Kind::kDone) throw InvalidArgument(end->cause, "Look at what the other hosts say");
      post(*end);
      const Plan nobodys{.epoch = epoch, .agents = here};
      await_others(nobodys);
      sweep(nobodys, *end);
      return std::nullopt;
    }
    if (has_ended()) return std::nullopt;
    store_->add(key(epoch, text("beat/", self_.seat)), 1);
    const auto seats =
        store::stored_number(key(epoch, "seats"), store_->try_get(key(epoch, "seats")).value_or("0"), 0, kSeats);
    here.clear();
    for (int64_t seat = 1; seat <= seats; ++seat) {
      const std::string name = key(epoch, text("seat/", seat));
      const auto value = store_->try_get(name);
      if (!value) continue;
      Pulse& pulse = pulses[seat];
      if ((beats(epoch, seat, &pulse, kLook) && pulse.seen) || seat == self_.seat)
        here.push_back(parse(name, *value, agent_of));
    }
    const bool settled = settle_wishes(here, pulses);
    if (here.size() != seen) quiet = Deadline::after(options_.last_call);
    seen = here.size();
    const auto count = static_cast<int>(here.size());
    const auto is_here = [&](const std::string& identity) {
      return std::any_of(here.begin(), here.end(), [&](const Agent& agent) { return agent.identity == identity; });
    };
    const bool all = !expected_.empty() && std::all_of(expected_.begin(), expected_.end(), is_here);
    if (settled && (count >= options_.most || (count >= options_.least && (all || quiet.passed()))))
      propose(epoch, here);
    if (deadline.passed())
      throw Timeout(text(count, " of ", options_.least, options_.least == 1 ? " agent" : " agents", " came within ",
                         options_.timeout.count(), " ms"),
                    {},
                    "Look whether muster run is started on the other hosts, with the same --rdzv, --nnodes and secret");
  }
}

// Two agents may ask for one number: a launcher that died while the agents met, and the one that was started in its
// place. Removes those that do not beat any more from `here`. Returns false while it is not known which of them beat.
bool Rendezvous::settle_wishes(std::vector<Agent>& here, std::map<int64_t, Pulse>& pulses) {
  bool settled = true;
  std::vector<int64_t> dead;
  for (const auto& agent : here) {
    Pulse& pulse = pulses[agent.seat];
    const bool has_rival = agent.wish >= 0 && std::any_of(here.begin(), here.end(), [&](const Agent& other) {
                             return other.wish == agent.wish && other.seat != agent.seat;
                           });
    if (!has_rival) {
      pulse.rivalled = 0;
      continue;
    }
    if (pulse.still == 0) ++pulse.rivalled;
    if (pulse.still >= kDead) {
      dead.push_back(agent.seat);
    } else if (pulse.rivalled < kAlive) {
      settled = false;
    }
  }
  std::erase_if(here,
                [&](const Agent& agent) { return std::find(dead.begin(), dead.end(), agent.seat) != dead.end(); });
  return settled;
}

void Rendezvous::propose(int epoch, std::vector<Agent> agents) {
  const auto before = [](const Agent& agent) { return agent.was >= 0; };
  if (std::any_of(agents.begin(), agents.end(), before) &&
      std::all_of(agents.begin(), agents.end(), [&](const Agent& agent) { return agent.done || !before(agent); }))
    return write_end(epoch, {.last = true});
  // Agents of the epoch before come first, whatever their seats.
  std::stable_sort(agents.begin(), agents.end(),
                   [](const Agent& a, const Agent& b) { return (a.was >= 0) > (b.was >= 0); });
  if (agents.size() > static_cast<size_t>(options_.most)) agents.resize(static_cast<size_t>(options_.most));
  try {
    put_in_order(agents);
  } catch (const InvalidArgument& error) {
    write_end(epoch, {.kind = EpochEnd::Kind::kFailed, .status = 2, .cause = error.message(), .last = true});
    throw;
  }
  Json plan = Json::array();
  for (const auto& agent : agents) plan.push_back(to_json(agent));
  store_->compare_set(key(epoch, "plan"), std::nullopt, plan.dump());
}

// --- an epoch ---

// Writes that all ranks of this node have succeeded. Returns whether those of all other nodes have, too.
bool Rendezvous::all_done(const Plan& plan) {
  const auto of = [&](int node) { return key(plan.epoch, text("done/", node)); };
  store_->set(key(plan.epoch, "done"), "");
  store_->set(of(plan.node), "");
  for (int node = 0; node < static_cast<int>(plan.agents.size()); ++node)
    if (node != plan.node && !store_->try_get(of(node))) return false;
  return true;
}

// Runs an epoch until its end is written: beats, watches the neighbour's beats, and writes what the supervisor reports.
// Returns that end, or nullopt if this rendezvous has to stop.
std::optional<EpochEnd> Rendezvous::run(const Plan& plan) {
  const int count = static_cast<int>(plan.agents.size());
  int next = (plan.node + 1) % count;
  Pulse pulse;
  auto look = Deadline::after(milliseconds(0));
  bool counted = false, told = false, wrote_last = false;
  const bool exhausted = plan.restarts() >= plan.max_restarts();
  const auto write_own = [&](EpochEnd end) {
    end.last = end.last || (exhausted && end.kind == EpochEnd::Kind::kFailed);
    wrote_last = wrote_last || end.last;
    write_end(plan.epoch, end);
  };
  for (;;) {
    beat(plan.epoch);
    if (look.passed() && next != plan.node) {
      look = Deadline::after(kBeat);
      const Agent& neighbour = plan.agents[static_cast<size_t>(next)];
      const bool lives = beats(plan.epoch, neighbour.seat, &pulse);
      if (!lives && store_->try_get(key(plan.epoch, text("done/", next)))) {
        // The neighbour's ranks are done, so the job does not need its agent any more, which may have left because the
        // store was silent for long. If it left before it could write the end, this agent writes it.
        if (counted && all_done(plan)) write_end(plan.epoch, {.last = true});
        next = (next + 1) % count;
        pulse = {};
      } else if (!lives) {
        write_end(plan.epoch, {.kind = EpochEnd::Kind::kLost,
                               .node = next,
                               .status = 1,
                               .cause = text("the agent of node ", next, " ('", neighbour.host,
                                             "') gave no sign of life for ", options_.patience.count() / 1000, " s"),
                               .last = exhausted && options_.least == options_.most});
      }
    }
    Words words = take_words();
    if (words.stop != 0 && !told) store_->compare_set(key(plan.epoch, "stop"), std::nullopt, text(words.stop));
    if (words.end) write_own(*words.end);
    if (words.done && !counted) {
      counted = true;
      if (all_done(plan)) write_end(plan.epoch, {.last = true});
    }
    // Waits for kLook at most, then the loop reads what the supervisor has said meanwhile.
    if (auto end = end_of(plan.epoch, kLook)) return end;
    if (stopping()) {
      if (Words last = take_words(); last.end) write_own(*last.end);
      if (wrote_last) {
        store_->add(key(plan.epoch, "seen"), 1);  // no agent has to wait for this one
      } else if (!told) {
        tell_stop(plan.epoch);  // the plan came just when the user had stopped this agent
      }
      return std::nullopt;
    }
    if (const auto stop = told ? std::nullopt : stop_of(plan.epoch)) {
      told = true;
      {
        const std::lock_guard lock(mutex_);
        to_stop_ = *stop;
        if (!stopped_since_) stopped_since_ = Clock::now();
      }
      post(StopRequest{*stop});
    }
  }
}

Rendezvous::Words Rendezvous::take_words() {
  const std::lock_guard lock(mutex_);
  return {std::exchange(to_write_, std::nullopt), done_, to_stop_};
}

}  // namespace muster::launch
