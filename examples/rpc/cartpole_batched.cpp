// CartPole as in cartpole.cpp, with one forward pass of the policy for all observers: coroutines instead of threads.
//
//   muster run -n 2 rpc_cartpole_batched --curve rewards.svg
//
// The agent's handler waits, without holding a thread, until all observers that play have asked. The last request
// computes the answers to all. An observer is a coroutine, too, so one worker can have many of them. The same training
// also runs with an agent that answers each request separately, and the program prints both times. Source of the idea:
// PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions".
#include <muster/comm/world.h>
#include <muster/rpc/rref.h>
#include <muster/rpc/task.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cartpole.h"
#include "policy_gradient.h"

namespace rpc = muster::rpc;

namespace {

using std::chrono::steady_clock;

// Both agents take one call per step, which brings the last step's reward.
class SingleAgent {
 public:
  static constexpr const char* kName = "one by one";
  explicit SingleAgent(const Settings& settings) : learner_(settings) {}

  void start_episode() {}
  int act(int observer, CartPole::State state) { return learner_.act(observer, state); }
  int go_on(int observer, float reward, CartPole::State state) {
    learner_.reward(observer, reward);
    return act(observer, state);
  }
  void end(int observer, float reward) { learner_.reward(observer, reward); }
  double finish_episode() { return learner_.learn(); }

 private:
  Learner learner_;
};

class BatchedAgent {
 public:
  static constexpr const char* kName = "batched";
  explicit BatchedAgent(const Settings& settings) : learner_(settings), observers_(settings.observers) {}

  void start_episode() {
    const std::lock_guard lock(mutex_);
    playing_ = observers_;
  }

  rpc::Task<int> act(int observer, CartPole::State state) {
    std::unique_lock lock(mutex_);
    const size_t place = batch_.observers.size();
    batch_.observers.push_back(observer);
    batch_.states.push_back(state);
    const auto answer = batch_.answer.future();
    answer_if_complete(std::move(lock));
    const Actions actions = co_await answer;
    co_return (*actions)[place];
  }
  rpc::Task<int> go_on(int observer, float reward, CartPole::State state) {
    learner_.reward(observer, reward);
    co_return co_await act(observer, state);
  }
  void end(int observer, float reward) {
    learner_.reward(observer, reward);
    std::unique_lock lock(mutex_);
    --playing_;
    answer_if_complete(std::move(lock));
  }
  double finish_episode() { return learner_.learn(); }

 private:
  using Actions = std::shared_ptr<const std::vector<int>>;
  struct Batch {
    std::vector<int> observers;
    std::vector<CartPole::State> states;
    rpc::Promise<Actions> answer;
  };

  // Fulfils the promise without the lock, because the waiting coroutines may resume in this thread.
  void answer_if_complete(std::unique_lock<std::mutex> lock) {
    if (batch_.observers.empty() || static_cast<int>(batch_.observers.size()) < playing_) return;
    Batch batch = std::exchange(batch_, Batch());
    lock.unlock();
    batch.answer.try_set_value(std::make_shared<std::vector<int>>(learner_.act(batch.observers, batch.states)));
  }

  Learner learner_;
  const int observers_;
  std::mutex mutex_;
  int playing_ = 0;  // observers whose episode is not over
  Batch batch_;
};

template <typename Agent>
class Observer {
 public:
  Observer(int id, uint64_t seed) : id_(id), pole_(seed) {}

  rpc::Task<int> run_episode(rpc::RRef<Agent> agent) {
    int action = co_await agent.template async<&Agent::act>(id_, pole_.reset());
    for (int steps = 1;; ++steps) {
      const auto step = pole_.step(action == 1);
      if (step.over) {
        co_await agent.template async<&Agent::end>(id_, step.reward);
        co_return steps;
      }
      action = co_await agent.template async<&Agent::go_on>(id_, step.reward, step.state);
    }
  }

 private:
  const int id_;
  CartPole pole_;
};

struct Result {
  Rewards rewards;
  double us_a_step = 0;  // of the median episode
};

template <typename Agent>
Result train(const Settings& settings) {
  const auto agent = std::make_shared<Agent>(settings);
  const auto me = rpc::make_rref(agent);
  const auto others = static_cast<int>(rpc::all_workers().size()) - 1;
  std::vector<rpc::RRef<Observer<Agent>>> observers;
  for (int i = 0; i < settings.observers; ++i)
    observers.push_back(rpc::remote<Observer<Agent>>(1 + i % others, i, settings.seed + static_cast<uint64_t>(i)));

  Result result;
  std::vector<double> us_a_step;
  for (int episode = 0; episode < settings.episodes; ++episode) {
    const auto start = steady_clock::now();
    agent->start_episode();
    std::vector<rpc::Future<int>> playing;
    for (const auto& observer : observers)
      playing.push_back(observer.template async<&Observer<Agent>::run_episode>(me));
    int steps = 0;
    for (const int each : rpc::when_all(std::move(playing)).get()) steps += each;
    us_a_step.push_back(std::chrono::duration<double, std::micro>(steady_clock::now() - start).count() / steps);
    result.rewards.add(agent->finish_episode());
  }
  const auto median = us_a_step.begin() + static_cast<std::ptrdiff_t>(us_a_step.size() / 2);
  std::nth_element(us_a_step.begin(), median, us_a_step.end());
  result.us_a_step = *median;
  return result;
}

template <typename Agent>
Result train_and_tell(const Settings& settings) {
  Result result = train<Agent>(settings);
  result.rewards.print_summary(Agent::kName);
  std::printf("%s: %.1f us for a step of an observer\n", Agent::kName, result.us_a_step);
  return result;
}

void compare(const Settings& settings) {
  // Runs both once, so that what libtorch loads at its first use does not count for the one that is measured first.
  Settings once = settings;
  once.episodes = 1;
  train<SingleAgent>(once);
  train<BatchedAgent>(once);

  const auto single = train_and_tell<SingleAgent>(settings);
  const auto batched = train_and_tell<BatchedAgent>(settings);
  std::printf("one forward pass for %d observers: %.2f times as fast\n", settings.observers,
              single.us_a_step / batched.us_a_step);
  Rewards::draw(settings.curve, {{SingleAgent::kName, single.rewards}, {BatchedAgent::kName, batched.rewards}});
}

}  // namespace

int main(int argc, char** argv) {
  const Settings settings = parse_settings(argc, argv, {.observers = 16});
  auto world = muster::init();
  rpc::init({.name = world.rank() == 0 ? "agent" : "observers" + std::to_string(world.rank())});
  if (world.rank() == 0 && world.world_size() > 1 && settings.observers > 0) compare(settings);
  rpc::shutdown();
}
