// How an agent joins: it takes a seat, waits until the agents of the next epoch have come, and proposes a plan or takes
// the one that another agent has proposed.
#include <algorithm>
#include <map>
#include <utility>

#include "base/text.h"
#include "launch/ranks/outcome.h"
#include "launch/rendezvous/rendezvous.h"
#include "launch/rendezvous/rendezvous_plan.h"
#include "muster/base/error.h"
#include "store/kit/outage.h"
#include "store/kit/stored_number.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kSeats = 1 << 16;  // more than any job has agents
// If two agents want the same number: an agent is dead after kDead looks without a beat, and lives after kAlive looks
// that saw one.
constexpr int kDead = 20, kAlive = 3;

}  // namespace

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
    if (here.size() != seen)
      quiet = Deadline::after(options_.last_call + (epoch > 0 ? options_.ending : milliseconds(0)));
    seen = here.size();
    const auto count = static_cast<int>(here.size());
    const auto is_here = [&](const std::string& identity) {
      return std::any_of(here.begin(), here.end(), [&](const Agent& agent) { return agent.identity == identity; });
    };
    const bool all = !expected_.empty() && std::all_of(expected_.begin(), expected_.end(), is_here);
    const bool late = deadline.passed();
    if (settled && (count >= options_.most || (count >= options_.least && (all || late || quiet.passed())))) {
      propose(epoch, here);
      continue;  // there is a plan now, or an end
    }
    if (late)
      throw TimeoutError(
          text(count, " of ", options_.least, options_.least == 1 ? " agent" : " agents", " came within ",
               options_.timeout.count(), " ms"),
          {}, "Look whether muster run is started on the other hosts, with the same --rdzv, --nnodes and secret");
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

}  // namespace muster::launch
