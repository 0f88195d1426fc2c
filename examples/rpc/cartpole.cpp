// Reinforcement learning with remote objects: PyTorch's tutorial "Getting Started with Distributed RPC Framework".
//
//   muster run -n 3 rpc_cartpole --curve rewards.svg
//
// Worker 0 has the agent, which trains the policy. Every other worker has an observer with its own CartPole. The agent
// tells the observers to play an episode. At each step an observer asks the agent what to do, through the RRef that it
// was given: a call inside a call. cartpole_batched.cpp does the same with one forward pass for all observers.
#include <muster/comm/world.h>
#include <muster/rpc/rref.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cartpole.h"
#include "policy_gradient.h"

namespace rpc = muster::rpc;

namespace {

// Handlers of one object run concurrently. That is safe here: each observer asks only for itself, and the policy is
// only read.
class Agent {
 public:
  explicit Agent(const Settings& settings) : learner_(settings) {}
  int select_action(int observer, CartPole::State state) { return learner_.act(observer, state); }
  void report_reward(int observer, float reward) { learner_.reward(observer, reward); }
  double finish_episode() { return learner_.learn(); }

 private:
  Learner learner_;
};

class Observer {
 public:
  Observer(int id, uint64_t seed) : id_(id), pole_(seed) {}

  void run_episode(rpc::RRef<Agent> agent) {
    CartPole::State state = pole_.reset();
    for (bool over = false; !over;) {
      const int action = agent.sync<&Agent::select_action>(id_, state);
      const auto step = pole_.step(action == 1);
      agent.sync<&Agent::report_reward>(id_, step.reward);
      state = step.state;
      over = step.over;
    }
  }

 private:
  const int id_;
  CartPole pole_;
};

void train(const Settings& settings) {
  const auto agent = std::make_shared<Agent>(settings);
  const auto me = rpc::make_rref(agent);
  const auto others = static_cast<int>(rpc::all_workers().size()) - 1;
  std::vector<rpc::RRef<Observer>> observers;
  for (int i = 0; i < settings.observers; ++i)
    observers.push_back(rpc::remote<Observer>(1 + i % others, i, settings.seed + static_cast<uint64_t>(i)));

  Rewards rewards;
  for (int episode = 0; episode < settings.episodes; ++episode) {
    std::vector<rpc::Future<void>> playing;
    for (const auto& observer : observers) playing.push_back(observer.async<&Observer::run_episode>(me));
    rpc::when_all(std::move(playing)).get();
    rewards.add(agent->finish_episode());
  }
  rewards.print_summary("all");
  Rewards::draw(settings.curve, {{"REINFORCE", rewards}});
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings = parse_settings(argc, argv, {});
  auto world = muster::init();
  if (settings.observers == 0) settings.observers = world.world_size() - 1;
  rpc::init({.name = world.rank() == 0 ? "agent" : "observer" + std::to_string(world.rank())});
  if (world.rank() == 0 && world.world_size() > 1) train(settings);
  rpc::shutdown();
}
