#include "launch/rendezvous/rendezvous.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <atomic>

#include "base/text.h"
#include "muster/base/error.h"
#include "store/kit/outage.h"
#include "support/forwarding_store.h"

namespace muster::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kPatience{20};

// An agent whose supervisor is the test.
struct Host {
  Host(const std::shared_ptr<Store>& store, const std::string& name, const RendezvousOptions& options, int ranks = 1,
       int wish = -1)
      : agents(std::make_unique<Rendezvous>(
            store,
            Agent{.host = name, .ranks = ranks, .wish = wish, .master_port = 1234, .max_restarts = 9, .identity = name},
            options)) {}

  Rendezvous::Event event() const {
    const auto deadline = Deadline::after(kPatience);
    for (;;) {
      if (auto event = agents->next_event()) return *std::move(event);
      if (deadline.passed()) throw TimeoutError("no event");
      pollfd ready{agents->events_fd(), POLLIN, 0};
      ::poll(&ready, 1, deadline.poll_ms());
    }
  }
  Plan plan() const {
    auto next = event();
    if (auto* error = std::get_if<std::exception_ptr>(&next)) std::rethrow_exception(*error);
    return std::get<Plan>(next);
  }
  EpochEnd end() const {
    auto next = event();
    if (auto* error = std::get_if<std::exception_ptr>(&next)) std::rethrow_exception(*error);
    return std::get<EpochEnd>(next);
  }

  std::unique_ptr<Rendezvous> agents;
};

std::vector<std::string> names(const Plan& plan) {
  std::vector<std::string> hosts;
  for (const auto& agent : plan.agents) hosts.push_back(agent.host);
  return hosts;
}

RendezvousOptions fixed(int agents) { return {.least = agents, .most = agents, .timeout = kPatience}; }
RendezvousOptions brief(int agents) {
  return {.least = agents, .most = agents, .patience = milliseconds(2000), .timeout = kPatience};
}

// Three agents of an elastic job of two or three, indexed by the node numbers that they were given.
std::vector<std::unique_ptr<Host>> three_that_met(const std::shared_ptr<Store>& store) {
  const RendezvousOptions elastic{
      .least = 2, .most = 3, .last_call = seconds(3), .patience = seconds(2), .timeout = kPatience};
  std::vector<std::unique_ptr<Host>> hosts, by_node(3);
  for (const char* name : {"a", "b", "c"}) hosts.push_back(std::make_unique<Host>(store, name, elastic));
  for (auto& host : hosts) {
    const auto node = static_cast<size_t>(host->plan().node);
    by_node[node] = std::move(host);
  }
  return by_node;
}

TEST(Rendezvous, AllAgentsGetOnePlanAndOneEnd) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(3), 2), b(store, "b", fixed(3), 1), c(store, "c", fixed(3), 4);
  const Plan plans[] = {a.plan(), b.plan(), c.plan()};
  int ranks = 0;
  for (int node = 0; node < 3; ++node) {
    const auto& mine =
        *std::find_if(std::begin(plans), std::end(plans), [&](const Plan& plan) { return plan.node == node; });
    EXPECT_EQ(names(mine), names(plans[0]));
    EXPECT_EQ(mine.first_rank(), ranks);
    EXPECT_EQ(mine.world_size(), 7);
    ranks += mine.agents[static_cast<size_t>(node)].ranks;
  }
  for (const Host* host : {&a, &b, &c}) host->agents->done();
  for (const Host* host : {&a, &b, &c}) EXPECT_EQ(host->end().kind, EpochEnd::Kind::kDone);
}

TEST(Rendezvous, WishesDecideTheOrder) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(3), 1, 2), b(store, "b", fixed(3), 1, 0), c(store, "c", fixed(3), 1, 1);
  EXPECT_EQ(names(a.plan()), (std::vector<std::string>{"b", "c", "a"}));
}

TEST(Rendezvous, TwoAgentsWithOneWishAreRefused) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(2), 1, 1), b(store, "b", fixed(2), 1, 1);
  EXPECT_THROW(a.plan(), InvalidArgument);
  EXPECT_THROW(b.plan(), InvalidArgument);
}

TEST(Rendezvous, WhoeverDoesNotComeIsWaitedForUntilTheTimeoutWhichSaysHowManyCame) {
  std::string said;
  for (const int timeout : {1, 4, 16}) {  // the longer ones are for a slow machine, where the other agent comes late
    auto options = fixed(3);
    options.timeout = seconds(timeout);
    const auto store = make_memory_store();
    const Host b(store, "b", fixed(3)), a(store, "a", options);  // b is there longer than a waits
    try {
      a.plan();
      FAIL() << "two made three";
    } catch (const TimeoutError& error) {
      said = error.what();
    }
    if (said.find("2 of 3 agents came") != std::string::npos) return;
  }
  FAIL() << said;
}

TEST(Rendezvous, AFailureIsToldToAllAndTheyMeetAgainInTheSameOrder) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(3)), b(store, "b", fixed(3)), c(store, "c", fixed(3));
  const Plan first = a.plan();
  b.plan();
  c.plan();
  b.agents->end({.kind = EpochEnd::Kind::kFailed, .node = 1, .status = 3, .cause = "rank 1 exited with status 3"});
  c.agents->end({.kind = EpochEnd::Kind::kFailed, .node = 2, .status = 4, .cause = "a later one"});
  const EpochEnd end = a.end();
  for (const Host* host : {&b, &c}) {
    const EpochEnd theirs = host->end();
    EXPECT_EQ(theirs.cause, end.cause) << "two causes of one end";
    EXPECT_EQ(theirs.status, end.status);
  }
  for (const Host* host : {&c, &b, &a}) host->agents->meet_again(1, 1234);
  const Plan second = c.plan();
  EXPECT_EQ(second.epoch, 1);
  EXPECT_EQ(names(second), names(first));
}

TEST(Rendezvous, AnAgentThatIsGoneIsMissedAndTheOthersGoOn) {
  const RendezvousOptions elastic{
      .least = 2, .most = 3, .last_call = seconds(3), .patience = seconds(2), .timeout = kPatience};
  const auto store = make_memory_store();
  const Host a(store, "a", elastic), b(store, "b", elastic);
  Host c(store, "c", elastic);
  const Plan first = a.plan();
  b.plan();
  c.plan();
  c.agents.reset();  // as if its host lost power: it sends nothing
  EXPECT_EQ(a.end().kind, EpochEnd::Kind::kLost);
  EXPECT_NE(b.end().cause.find("gave no sign of life"), std::string::npos);
  a.agents->meet_again(1, 1234);
  b.agents->meet_again(1, 1234);
  const Plan second = a.plan();
  EXPECT_EQ(second.agents.size(), 2u);
  EXPECT_EQ(names(b.plan()), names(second));
}

// The agent goes like a launcher whose store was silent for a long time; nobody needs it any more.
TEST(Rendezvous, AnAgentThatIsGoneWhenItsRanksAreDoneIsNotMissed) {
  const auto store = make_memory_store();
  Host a(store, "a", brief(2));
  const Host b(store, "b", brief(2));
  const Plan plan = a.plan();
  b.plan();
  a.agents->done();
  store->get(text("agents/0/done/", plan.node), Deadline::after(kPatience));
  a.agents.reset();
  pollfd nothing{b.agents->events_fd(), POLLIN, 0};
  EXPECT_EQ((b.agents->next_event(), ::poll(&nothing, 1, 5000)), 0) << "more than twice its patience";
  b.agents->done();
  EXPECT_EQ(b.end().kind, EpochEnd::Kind::kDone);
}

TEST(Rendezvous, BehindOneThatIsDoneTheNextIsWatched) {
  const auto store = make_memory_store();
  const auto by_node = three_that_met(store);
  by_node[1]->agents->done();
  store->get("agents/0/done/1", Deadline::after(kPatience));
  by_node[1]->agents.reset();
  by_node[2]->agents.reset();
  const EpochEnd end = by_node[0]->end();
  EXPECT_EQ(end.kind, EpochEnd::Kind::kLost);
  EXPECT_EQ(end.node, 2);
}

TEST(Rendezvous, OneMoreIsLetInWhereThereIsRoomAndElseWaits) {
  const RendezvousOptions elastic{
      .least = 1, .most = 2, .last_call = seconds(3), .patience = seconds(2), .timeout = kPatience};
  const auto store = make_memory_store();
  Host a(store, "a", elastic);
  EXPECT_EQ(a.plan().agents.size(), 1u);
  const Host b(store, "b", elastic);
  EXPECT_EQ(a.end().kind, EpochEnd::Kind::kRoom);
  a.agents->meet_again(1, 1234);
  EXPECT_EQ(names(a.plan()), (std::vector<std::string>{"a", "b"})) << "the agent that was there before keeps its place";
  EXPECT_EQ(b.plan().node, 1);
  const Host spare(store, "c", elastic);
  EXPECT_FALSE(spare.agents->next_event()) << "there is no room for three";
  a.agents.reset();
  EXPECT_EQ(b.end().kind, EpochEnd::Kind::kLost);
  b.agents->meet_again(1, 1234);
  EXPECT_EQ(b.plan().agents.size(), 2u);
  EXPECT_EQ(spare.plan().agents.size(), 2u);
}

TEST(Rendezvous, WhoeverStaysKeepsItsNumberAndTheLastFillsTheHole) {
  const auto store = make_memory_store();
  const auto by_node = three_that_met(store);
  by_node[0]->agents.reset();
  for (const size_t node : {1u, 2u}) EXPECT_EQ(by_node[node]->end().kind, EpochEnd::Kind::kLost);
  by_node[1]->agents->meet_again(1, 1234, 0);
  by_node[2]->agents->meet_again(1, 1234);  // its ranks did not stay
  for (const auto& [before, now] : {std::pair<size_t, int>{1, 1}, {2, 0}}) {
    const Plan plan = by_node[before]->plan();
    EXPECT_EQ(plan.node, now);
    EXPECT_EQ(plan.line(), 0) << "the line of those that stayed";
  }
}

TEST(Rendezvous, ALineEndsWhereNoRankStays) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(1));
  EXPECT_EQ(a.plan().line(), 0);
  a.agents->end({.kind = EpochEnd::Kind::kFailed, .node = 0, .status = 3, .cause = "x"});
  a.end();
  a.agents->meet_again(1, 1234);
  EXPECT_EQ(a.plan().line(), 1);
}

TEST(Rendezvous, AStopIsHeardByAll) {
  const auto store = make_memory_store();
  const Host a(store, "a", fixed(2)), b(store, "b", fixed(2));
  a.plan();
  b.plan();
  a.agents->stop(15);
  for (const Host* host : {&a, &b}) {
    const auto event = host->event();
    ASSERT_TRUE(std::holds_alternative<StopRequest>(event));
    EXPECT_EQ(std::get<StopRequest>(event).signal, 15);
  }
}

TEST(Rendezvous, AStopBetweenTwoEpochsIsHeardByAllThatMeetAgain) {
  for (const bool meets : {false, true}) {
    SCOPED_TRACE(meets ? "while it meets the others" : "before it does");
    const auto store = make_memory_store();
    const Host a(store, "a", fixed(3)), b(store, "b", fixed(3)), c(store, "c", fixed(3));
    for (const Host* host : {&a, &b, &c}) host->plan();
    b.agents->end({.kind = EpochEnd::Kind::kFailed, .node = 1, .status = 3, .cause = "rank 1 exited with status 3"});
    for (const Host* host : {&a, &b, &c}) EXPECT_FALSE(host->end().last);
    a.agents->meet_again(1, 1234);
    if (meets) c.agents->meet_again(1, 1234);
    store->get(text("agents/1/seat/", meets ? 2 : 1), Deadline::after(kPatience));
    c.agents->stop(15);
    c.agents->leave();
    const auto heard = [](const Host& host) {
      const auto event = host.event();
      return std::holds_alternative<StopRequest>(event) ? std::get<StopRequest>(event).signal : -1;
    };
    EXPECT_EQ(heard(a), 15);
    b.agents->meet_again(1, 1234);  // its ranks took longer to end
    EXPECT_EQ(heard(b), 15);
  }
}

TEST(Rendezvous, WhoeverNeverHadAPlaceStopsNobody) {
  const auto store = make_memory_store();
  Host gone(store, "a", fixed(2));
  store->get("agents/0/seat/1", Deadline::after(kPatience));
  gone.agents->stop(15);
  gone.agents.reset();
  const Host b(store, "b", fixed(2)), c(store, "c", fixed(2));
  EXPECT_EQ(b.plan().agents.size(), 2u);
  EXPECT_EQ(c.plan().agents.size(), 2u);
}

TEST(Rendezvous, ASeatWithoutAnAgentHoldsUpNobody) {
  const auto store = make_memory_store();
  store->add("agents/0/seats", 1);  // the seat of an agent that died before it described itself
  const Host a(store, "a", fixed(2)), b(store, "b", fixed(2));
  EXPECT_EQ(a.plan().agents.size(), 2u);
  EXPECT_EQ(b.plan().agents.size(), 2u);
}

TEST(Rendezvous, AnAbandonedEpochIsNotWaitedForForEver) {
  const RendezvousOptions elastic{
      .least = 1, .most = 1, .last_call = milliseconds(500), .patience = seconds(1), .timeout = kPatience};
  const auto store = make_memory_store();
  {
    const Host gone(store, "a", elastic);
    gone.plan();
  }
  const Host next(store, "b", elastic);
  EXPECT_EQ(next.plan().epoch, 1);
}

TEST(Rendezvous, AllCountTheJobsRestartsAlike) {
  const auto store = make_memory_store();
  const auto with = [&](const std::string& name, int restarts, int most) {
    return std::make_unique<Rendezvous>(
        store, Agent{.host = name, .restarts = restarts, .max_restarts = most, .identity = name}, fixed(2));
  };
  Host a(make_memory_store(), "x", fixed(1)), b(make_memory_store(), "x", fixed(1));
  a.agents = with("a", 2, 5);
  b.agents = with("b", 0, 3);
  for (const Host* host : {&a, &b}) {
    const Plan plan = host->plan();
    EXPECT_EQ(plan.restarts(), 2);
    EXPECT_EQ(plan.max_restarts(), 3);
  }
}

using test::ForwardingStore;

// A store that other processes serve, and that may be unreachable.
class Away final : public ForwardingStore, public store::Outage {
 public:
  explicit Away(std::shared_ptr<Store> store = make_memory_store()) : ForwardingStore(std::move(store)) {}

  std::atomic<bool> away{false};

  bool comes_again() const override { return true; }
  void set_call_timeout(milliseconds) override {}

 private:
  Store& here() const override {
    if (away) throw Unavailable("away");
    return ForwardingStore::here();
  }
};

// Waits until the agent of that seat, which waits for a plan, has sent two more heartbeats. So it has looked at all
// others once.
void await_look(Store& store, int seat) {
  const auto beats = [&] { return std::stoll(store.try_get(text("agents/0/beat/", seat)).value_or("0")); };
  const auto patience = Deadline::after(kPatience);
  for (const auto first = beats(); beats() < first + 2 && !patience.passed();) ::poll(nullptr, 0, 1);
}

// The host of the second agent loses power and comes back while the third has yet to come.
TEST(Rendezvous, AnAgentThatIsStartedAgainTakesThePlaceOfTheDeadOneThatWantedTheSame) {
  const auto store = make_memory_store();
  const Host first(store, "first", fixed(3), 1, 0);
  store->get("agents/0/seat/1", Deadline::after(kPatience));
  const auto power = std::make_shared<Away>(store);
  const Host dead(power, "dead", fixed(3), 1, 1);
  store->get("agents/0/seat/2", Deadline::after(kPatience));
  for (int i = 0; i < 2; ++i) {  // so that the others have seen its heartbeat
    await_look(*store, 1);
    await_look(*store, 2);
    await_look(*store, 1);
  }
  power->away = true;
  const Host again(store, "again", fixed(3), 1, 1);
  store->get("agents/0/seat/3", Deadline::after(kPatience));
  for (int i = 0; i < 2; ++i) {
    await_look(*store, 3);
    await_look(*store, 1);
  }
  const Host last(store, "last", fixed(3), 1, 2);
  for (const Host* host : {&first, &again, &last})
    EXPECT_EQ(names(host->plan()), (std::vector<std::string>{"first", "again", "last"}));
}

TEST(Rendezvous, AStoreThatWasAwayIsNobodysDeathAndNoEpochsEnd) {
  const auto store = std::make_shared<Away>();
  const Host a(store, "a", brief(2)), b(store, "b", brief(2));
  a.plan();
  b.plan();
  store->away = true;
  for (const Host* host : {&a, &b}) EXPECT_EQ(std::get<StoreSilence>(host->event()).why, "away");
  pollfd nothing{a.agents->events_fd(), POLLIN, 0};
  EXPECT_EQ((a.agents->next_event(), ::poll(&nothing, 1, 5000)), 0)
      << "more than twice as long as an agent may be silent";
  store->away = false;
  for (const Host* host : {&a, &b}) EXPECT_EQ(std::get<StoreSilence>(host->event()).why, "");
  for (const Host* host : {&a, &b}) host->agents->done();
  for (const Host* host : {&a, &b}) EXPECT_EQ(host->end().kind, EpochEnd::Kind::kDone);
}

TEST(Rendezvous, WhatIsSaidWhileTheStoreIsAwayIsSaidThenAndCountsOnce) {
  const auto store = std::make_shared<Away>();
  const Host a(store, "a", brief(2)), b(store, "b", brief(2));
  a.plan();
  b.plan();
  store->away = true;
  for (const Host* host : {&a, &b}) EXPECT_EQ(std::get<StoreSilence>(host->event()).why, "away");
  a.agents->done();
  EXPECT_FALSE(a.agents->next_event());
  pollfd nothing{a.agents->events_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&nothing, 1, 300), 0);
  store->away = false;
  for (const Host* host : {&a, &b}) EXPECT_EQ(std::get<StoreSilence>(host->event()).why, "");
  EXPECT_FALSE(a.agents->next_event());
  EXPECT_EQ(::poll(&nothing, 1, 300), 0) << "the other is not done";
  b.agents->done();
  for (const Host* host : {&a, &b}) EXPECT_EQ(host->end().kind, EpochEnd::Kind::kDone);
}

// An agent that needs the store waits for a while; if the user wants to stop, it waits for less.
TEST(Rendezvous, WhoeverNeedsAStoreThatStaysAwayIsToldInTime) {
  const auto store = std::make_shared<Away>();
  auto options = brief(1);
  options.patience = milliseconds(200);
  const Host fails(store, "a", options);
  fails.plan();
  store->away = true;
  EXPECT_EQ(std::get<StoreSilence>(fails.event()).why, "away");
  auto since = Clock::now();
  fails.agents->end({.kind = EpochEnd::Kind::kFailed, .node = 0, .status = 3, .cause = "rank 0"});
  EXPECT_THROW(fails.end(), Unavailable);
  EXPECT_GE(Clock::now() - since, kNeeded * options.patience);

  const auto other = std::make_shared<Away>();
  const Host stops(other, "b", options);
  stops.plan();
  other->away = true;
  EXPECT_EQ(std::get<StoreSilence>(stops.event()).why, "away");
  since = Clock::now();
  stops.agents->stop(15);
  EXPECT_THROW(stops.end(), Unavailable);
  EXPECT_GE(Clock::now() - since, kStopTakes * options.patience);
  EXPECT_LT(Clock::now() - since, kNeeded * options.patience);

  const auto empty = std::make_shared<Away>();
  options.least = options.most = 2;
  const Host waits(empty, "c", options);  // waits for another agent, which does not come
  empty->get("agents/0/seat/1", Deadline::after(kPatience));
  empty->away = true;
  EXPECT_EQ(std::get<StoreSilence>(waits.event()).why, "away");
  EXPECT_THROW(waits.plan(), Unavailable);
}

TEST(Rendezvous, NonsenseInTheStoreIsCorrupt) {
  const auto store = make_memory_store();
  store->set("agents/0/plan", "what is this");
  EXPECT_THROW(Host(store, "a", fixed(1)).plan(), CorruptError);
  for (const char* stop : {"", "x", "-1", "0", "65", "9 ", "99999999999999999999"}) {
    const auto other = make_memory_store();
    other->set("agents/0/stop", stop);
    EXPECT_THROW(Host(other, "a", fixed(1)).plan(), CorruptError) << stop;
  }
}

TEST(Rendezvous, EndsWhenItIsDestroyedWhateverItDoes) {
  const auto store = make_memory_store();
  { const Host waits_for_others(store, "a", fixed(2)); }
  const auto other = make_memory_store();
  const Host runs(other, "a", fixed(1));
  runs.plan();
}

}  // namespace
}  // namespace muster::launch
