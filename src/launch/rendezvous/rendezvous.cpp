#include "launch/rendezvous/rendezvous.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "base/thread.h"
#include "launch/ranks/outcome.h"
#include "launch/rendezvous/patient_store.h"
#include "launch/rendezvous/rendezvous_plan.h"
#include "muster/base/error.h"
#include "store/kit/erase_all.h"
#include "store/kit/outage.h"
#include "store/kit/stored_number.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFarewell{3000};  // the time in which the other agents may learn of the job's end
constexpr const char* kEnded = "ended";  // the job's only key after its end

}  // namespace

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
    beat(plan.epoch);  // a new agent has all epochs before it
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
  Plan plan{.epoch = epoch, .agents = parse(name, *found, agents_of), .node = -1};
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
        await_others(plan);  // the supervisor may serve the store
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
