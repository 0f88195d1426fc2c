// Steps with contexts, some of which end by an error or by the death of a worker: whatever happens, nothing of them is
// left on any worker that lives, and nobody waits for ever.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/file_text.h"
#include "base/text.h"
#include "muster/autograd/context.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/forked.h"
#include "support/led_job.h"
#include "support/nothing_left.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;
using rpc::RRef;

// Of the weights: 72 KB each. If one leaks in every third of 1,000 steps, a worker grows by more than the test allows.
constexpr int64_t kSize = 96;

// --- what happens in a step ---

enum Where { kNowhere, kMiddle, kLast };
enum When { kForward, kBackward };
struct Order {
  int where = kNowhere, when = kForward;
  int kills = 0;  // this process; 0: throws instead
  MSGPACK_DEFINE(where, when, kills);
};

// Returns when the process is dead, so that nothing it would have done comes afterwards.
void kill_and_wait(int pid) {
  ::kill(pid, SIGKILL);
  for (;;) {
    const std::string line = text_of_file(text("/proc/", pid, "/stat"));
    const size_t name_end = line.rfind(')');
    if (name_end == std::string::npos || line[name_end + 2] == 'Z' || line[name_end + 2] == 'X') return;
    std::this_thread::yield();
  }
}
void obey(const Order& order, Where where, When when) {
  if (order.where != where || order.when != when) return;
  if (order.kills == 0) throw std::domain_error("as ordered");
  kill_and_wait(order.kills);
}

Tensor weight_of(int64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
  return (at::randn({kSize, kSize}, generator, at::kDouble) / std::sqrt(static_cast<double>(kSize)))
      .set_requires_grad(true);
}
Tensor activated(const Tensor& x, const Tensor& weight) { return x.matmul(weight).tanh(); }

// Each worker has one.
class FallibleLayer {
 public:
  explicit FallibleLayer(int64_t rank) : weight_(weight_of(rank)) {}

  Tensor forward(const Tensor& x, Order order) { return forward_at(kLast, x, order); }
  Tensor through(const Tensor& x, RRef<FallibleLayer> next, Order order) {
    const Tensor y = next.sync<&FallibleLayer::forward>(activated(x, weight_), order);
    return forward_at(kMiddle, y, order);
  }
  Tensor gradient() { return autograd::gradient(weight_); }

 private:
  Tensor forward_at(Where where, const Tensor& x, const Order& order) {
    obey(order, where, kForward);
    Tensor y = activated(x, weight_);
    y.register_hook([order, where](Tensor gradient) {
      obey(order, where, kBackward);
      return gradient;
    });
    return y;
  }
  const Tensor weight_;
};

enum Ending { kBackwardAndGradients, kGivenUp, kGivenUpAtOnce, kBackwardTooLate };

// One step, on whichever worker: its own layer, then A→B→C, A→C, and A→B whose result stays there.
// Says "ok", or the kind of the error.
std::string step(RRef<FallibleLayer> middle, RRef<FallibleLayer> last, int64_t seed, Order order, int ending) {
  try {
    autograd::Context context;
    const Tensor weight = weight_of(seed), x = weight_of(seed + 1).detach();
    const Tensor h = activated(x, weight);
    const auto aside = last.async<&FallibleLayer::forward>(h, Order{});
    const auto kept = middle.remote<&FallibleLayer::forward>(h, Order{});
    const auto through = middle.async<&FallibleLayer::through>(h, last, order);
    if (ending == kGivenUpAtOnce) return "given up";
    const Tensor loss = (through.get() + aside.get() + kept.to_here()).sum();
    if (ending == kGivenUp) return "given up";
    if (ending == kBackwardTooLate) context.end();
    autograd::backward(context, {loss});

    const Tensor of_middle = weight_of(middle.owner().id), of_last = weight_of(last.owner().id);
    const Tensor h1 = activated(x, weight);
    const Tensor y = activated(activated(activated(h1, of_middle), of_last), of_middle);
    (y + activated(h1, of_last) + activated(h1, of_middle)).sum().backward();
    const std::vector<std::pair<Tensor, Tensor>> pairs{{context.gradient(weight), weight.grad()},
                                                       {middle.sync<&FallibleLayer::gradient>(), of_middle.grad()},
                                                       {last.sync<&FallibleLayer::gradient>(), of_last.grad()}};
    for (const auto& [there, here] : pairs)
      if (!there.defined() || !at::allclose(there, here, 1e-9, 1e-9)) return "wrong gradients";
    return "ok";
  } catch (const RemoteError& error) {
    return text("RemoteError: ", error.what());
  } catch (const PeerLost& error) {
    return text("PeerLost: ", error.what());
  } catch (const Aborted& error) {
    return text("Aborted: ", error.what());
  }
}

// --- what is left ---

int64_t resident_kb() {
  ::malloc_trim(0);  // what is free, but kept for the next allocation, does not leak
  int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages >> pages;
  return pages * ::sysconf(_SC_PAGESIZE) / 1024;
}
int pid_here() { return ::getpid(); }

// --- the campaign ---

struct Kill {
  int where, when, victim;  // of creator 0, middle 1, last 2
};
constexpr int kAnyTime = -1;
constexpr Kill kKills[] = {{kLast, kForward, 1}, {kMiddle, kBackward, 0}, {kLast, kBackward, 2},
                           {kAnyTime, 0, 0},     {kLast, kBackward, 1},   {kLast, kForward, 0},
                           {kAnyTime, 0, 1},     {kLast, kForward, 2},    {kMiddle, kForward, 0}};
constexpr int kErrors = 7;  // four that throw, and three endings

class Campaign {
 public:
  Campaign(int workers, int steps, int kills, unsigned seed)
      : steps_(steps), kills_(kills), dice_(seed), living_(static_cast<size_t>(workers)) {
    std::iota(living_.begin(), living_.end(), 0);
    for (const int worker : living_) {
      layers_.push_back(rpc::remote<FallibleLayer>(worker, int64_t{worker}));
      pids_.push_back(rpc::sync<&pid_here>(worker));
    }
  }

  void run() {
    const int bad = steps_ / 10;
    int errors = 0, killed = 0;
    for (int done = 0; done < steps_ && !testing::Test::HasFailure(); done += 2) {
      if (done == steps_ / 5) measure(resident_before_);
      // In every tenth step something happens; in `kills_` of these a worker dies. A good step runs beside it.
      if (done % 10 != 0) {
        both({}, kBackwardAndGradients, -1, {"ok"});
      } else if ((killed + errors) * kills_ / bad != (killed + errors + 1) * kills_ / bad) {
        one_that_kills(kKills[static_cast<size_t>(killed++) % std::size(kKills)]);
        nothing_is_left(1);
      } else {
        one_that_fails(errors++ % kErrors);
        nothing_is_left(1);
      }
    }
    std::map<int, int64_t> resident_after;
    measure(resident_after);
    int64_t most = 0;
    for (const int worker : living_) most = std::max(most, resident_after[worker] - resident_before_[worker]);
    EXPECT_LT(most, 16'000) << "KB that a worker has grown by";
    for (const int worker : living_) layers_[static_cast<size_t>(worker)] = {};
    nothing_is_left(0);
    EXPECT_EQ(rpc::census().pending_calls, 0u);
    said_ = text(steps_, " steps, ", errors, " errors, ", killed, " killed, ", most, " KB more at most");
  }
  const std::string& said() const { return said_; }

 private:
  using Workers = std::vector<int>;

  Workers three() {
    Workers chosen;
    std::sample(living_.begin(), living_.end(), std::back_inserter(chosen), 3, dice_);
    std::shuffle(chosen.begin(), chosen.end(), dice_);
    return chosen;
  }
  rpc::Future<std::string> start(const Workers& at, const Order& order, int ending) {
    return rpc::async<&step>({at[0], {.timeout = kPatience}}, layer(at[1]), layer(at[2]), int64_t(dice_()), order,
                             ending);
  }
  const RRef<FallibleLayer>& layer(int worker) const { return layers_[static_cast<size_t>(worker)]; }
  static std::string outcome(const rpc::Future<std::string>& answer) {
    try {
      return answer.get();
    } catch (const PeerLost& error) {
      return text("PeerLost: ", error.what());
    } catch (const Error& error) {  // also TimeoutError: something hangs
      return text("thrown: ", error.what());
    }
  }
  static void expect_one_of(const std::string& outcome, const std::vector<std::string>& expected,
                            const std::string& what) {
    EXPECT_TRUE(std::any_of(expected.begin(), expected.end(),
                            [&](const std::string& one) { return outcome.rfind(one, 0) == 0; }))
        << what << ": " << outcome;
  }

  // A step that is ordered to fail, and another beside it, on whichever workers.
  void both(Order order, int ending, int victim, const std::vector<std::string>& expected, Workers at = {}) {
    if (at.empty()) at = three();
    const Workers beside = three();
    what_ = text("step on ", at[0], "→", at[1], "→", at[2], ", where ", order.where, ", when ", order.when, ", ending ",
                 ending, ", victim ", victim);
    const auto first = start(at, order, ending), second = start(beside, {}, kBackwardAndGradients);
    if (order.where == kAnyTime) {
      const auto until = Clock::now() + std::chrono::microseconds(dice_() % 4000);
      while (Clock::now() < until) std::this_thread::yield();
      kill_and_wait(pids_[static_cast<size_t>(victim)]);
    }
    expect_one_of(outcome(first), expected, what_);
    const bool hit = std::find(beside.begin(), beside.end(), victim) != beside.end();
    expect_one_of(outcome(second),
                  hit ? std::vector<std::string>{"ok", "PeerLost", "RemoteError"} : std::vector<std::string>{"ok"},
                  text("beside, on ", beside[0], "→", beside[1], "→", beside[2], ", a ", what_));
  }
  void one_that_fails(int kind) {
    if (kind < 4) {
      both({.where = kind % 2 ? kMiddle : kLast, .when = kind / 2}, kBackwardAndGradients, -1, {"RemoteError"});
    } else {
      const int ending = kind - 4 + kGivenUp;
      both({}, ending, -1, {ending == kBackwardTooLate ? "Aborted" : "given up"});
    }
  }
  void one_that_kills(const Kill& kill) {
    Workers at = three();
    while (at[static_cast<size_t>(kill.victim)] == 0) at = three();  // this one, which tells what happens
    const int victim = at[static_cast<size_t>(kill.victim)];
    std::vector<std::string> expected{"PeerLost", "RemoteError"};
    if (kill.where == kAnyTime) expected.push_back("ok");
    both({.where = kill.where, .when = kill.when, .kills = pids_[static_cast<size_t>(victim)]}, kBackwardAndGradients,
         victim, expected, at);
    std::erase(living_, victim);
    layers_[static_cast<size_t>(victim)] = {};
  }

  void nothing_is_left(size_t objects) {
    for (const int worker : living_) expect_nothing_left_on(worker, objects, text(" after a ", what_));
  }
  void measure(std::map<int, int64_t>& resident) {
    for (const int worker : living_) resident[worker] = rpc::sync<&resident_kb>(worker);
  }

  const int steps_, kills_;
  std::mt19937 dice_;
  Workers living_, pids_;
  std::vector<RRef<FallibleLayer>> layers_;
  std::map<int, int64_t> resident_before_;
  std::string what_, said_;  // of the last step; of all
};

void campaign(int steps, int kills, unsigned seed) {
  const int workers = kills + 4;
  const auto before = leftovers();
  {
    const ForkedJob job;
    ForkedRanks ranks(workers, [&](int rank) {
      return lead_or_serve(job, rank, workers, {}, [&] {
        Campaign all(workers, steps, kills, seed);
        all.run();
        return all.said();
      });
    });
    const auto end = ranks.wait(0, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    std::cout << end.said << "\n";
    for (int rank = 1; rank < workers; ++rank) {
      const auto other = ranks.wait(rank, patience());
      if (!other.exited) {
        EXPECT_EQ(other.signal, SIGKILL) << "worker " << rank << " does not end";
      } else {
        EXPECT_EQ(other.status, 0) << "worker " << rank << ": " << other.said;
      }
    }
  }
  EXPECT_EQ(leftovers(), before);
}

// MUSTER_AUTOGRAD_STEPS: as many steps, in a job of more workers.
TEST(RpcFaultProcess, GradientsWhileStepsFailAndWorkersDie) {
  const char* const steps = std::getenv("MUSTER_AUTOGRAD_STEPS");
  if (steps) {
    campaign(std::atoi(steps), 9, 1);
  } else {
    campaign(100, 4, 2);
  }
}

}  // namespace
}  // namespace muster::test
