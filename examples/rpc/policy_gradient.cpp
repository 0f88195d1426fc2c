#include "policy_gradient.h"

#include <muster/train/plot.h>
#include <torch/nn/functional/activation.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <numeric>

Settings parse_settings(int argc, char** argv, Settings settings) {
  CLI::App app("Learns to balance a pole: an agent on worker 0, observers on the others.");
  app.add_option("--observers", settings.observers, "number of observers; 0: one on each worker but the agent's")
      ->check(CLI::Range(0, 1000))
      ->capture_default_str();
  app.add_option("--episodes", settings.episodes, "episodes per observer")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str();
  app.add_option("--hidden", settings.hidden, "width of the policy")->check(CLI::Range(1, 8192))->capture_default_str();
  app.add_option("--lr", settings.lr, "learning rate")->capture_default_str();
  app.add_option("--gamma", settings.gamma, "discount of a reward per step")->capture_default_str();
  app.add_option("--seed", settings.seed, "seed of the weights, the episodes and the actions")->capture_default_str();
  app.add_option("--curve", settings.curve, "draw the rewards in this file")->type_name("FILE.svg");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  return settings;
}

namespace {

torch::nn::Sequential make_policy(const Settings& settings) {
  torch::manual_seed(settings.seed);
  return torch::nn::Sequential(torch::nn::Linear(4, settings.hidden), torch::nn::ReLU(),
                               torch::nn::Linear(settings.hidden, 2));
}

double mean_of(std::span<const double> numbers) {
  return std::accumulate(numbers.begin(), numbers.end(), 0.0) / static_cast<double>(numbers.size());
}

}  // namespace

Learner::Learner(const Settings& settings)
    : settings_(settings),
      policy_(make_policy(settings)),
      adam_(policy_->parameters(), torch::optim::AdamOptions(settings.lr)),
      episodes_(static_cast<size_t>(settings.observers)) {
  for (size_t i = 0; i < episodes_.size(); ++i) episodes_[i].random.seed(1000 * settings.seed + i);
}

std::vector<int> Learner::act(std::span<const int> observers, std::span<const CartPole::State> states) {
  const torch::NoGradGuard no_grad;
  const auto rows = static_cast<int64_t>(states.size());
  auto* const floats = const_cast<float*>(states.front().data());  // const_cast is safe: the tensor is only read
  const auto right = policy_->forward(torch::from_blob(floats, {rows, 4})).softmax(1).select(1, 1);
  const auto probability = right.accessor<float, 1>();
  std::vector<int> actions;
  for (int64_t row = 0; row < rows; ++row) {
    Episode& mine = episode(observers[static_cast<size_t>(row)]);
    const CartPole::State& state = states[static_cast<size_t>(row)];
    const int action = std::generate_canonical<double, 53>(mine.random) < probability[row] ? 1 : 0;
    mine.states.insert(mine.states.end(), state.begin(), state.end());
    mine.actions.push_back(action);
    actions.push_back(action);
  }
  return actions;
}

// The policy does not change during these episodes. So one forward pass at their end gives the same gradients as the
// passes of all steps together.
double Learner::learn() {
  std::vector<float> states, returns;
  std::vector<int64_t> actions;
  double rewards = 0;
  for (Episode& mine : episodes_) {
    states.insert(states.end(), mine.states.begin(), mine.states.end());
    actions.insert(actions.end(), mine.actions.begin(), mine.actions.end());
    float sum = 0;
    for (auto reward = mine.rewards.rbegin(); reward != mine.rewards.rend(); ++reward)
      *reward = sum = *reward + static_cast<float>(settings_.gamma) * sum;
    returns.insert(returns.end(), mine.rewards.begin(), mine.rewards.end());
    rewards += static_cast<double>(mine.rewards.size());  // each was 1
    mine.states.clear();
    mine.actions.clear();
    mine.rewards.clear();
  }
  const auto count = static_cast<int64_t>(actions.size());
  auto value = torch::tensor(returns);
  value = (value - value.mean()) / (value.std() + 1e-7);
  const auto log_probability = policy_->forward(torch::tensor(states).view({count, 4})).log_softmax(1);
  const auto chosen = log_probability.gather(1, torch::tensor(actions).unsqueeze(1)).squeeze(1);
  adam_.zero_grad();
  (-chosen * value).sum().backward();
  adam_.step();
  return rewards / static_cast<double>(episodes_.size());
}

void Rewards::add(double mean_reward) {
  rewards_.push_back(mean_reward);
  seconds_.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
  running_.push_back(running_.empty() ? mean_reward : 0.9 * running_.back() + 0.1 * mean_reward);
  if (rewards_.size() % 10 == 0)
    std::printf("episode %3zu: mean reward %5.1f, running %5.1f\n", rewards_.size(), mean_reward, running_.back());
  std::fflush(stdout);
}

void Rewards::print_summary(const std::string& name) const {
  const std::span all(rewards_);
  const size_t few = std::min<size_t>(5, all.size());
  std::printf("%s: mean reward %.1f in the first %zu episodes, %.1f in the last\n", name.c_str(),
              mean_of(all.first(few)), few, mean_of(all.last(few)));
}

void Rewards::draw(const std::string& path, const std::vector<std::pair<std::string, Rewards>>& all) {
  if (path.empty()) return;
  muster::Panel by_episode{.title = "by episode", .x_label = "episode", .series = {}, .x_whole = true, .y_min = 0};
  muster::Panel by_time{.title = "by time", .x_label = "seconds", .series = {}, .x_min = 0, .y_min = 0};
  for (size_t i = 0; i < all.size(); ++i) {
    const auto& [name, one] = all[i];
    std::vector<double> episodes(one.rewards_.size());
    std::iota(episodes.begin(), episodes.end(), 1);
    const auto color = static_cast<int>(i);
    by_episode.series.push_back({.x = episodes, .y = one.rewards_, .faint = true, .color = color});
    by_episode.series.push_back({.name = name, .x = episodes, .y = one.running_, .color = color});
    by_time.series.push_back({.x = one.seconds_, .y = one.rewards_, .faint = true, .color = color});
    by_time.series.push_back({.name = name, .x = one.seconds_, .y = one.running_, .color = color});
  }
  const muster::Chart chart{.title = "CartPole",
                            .subtitle = "steps that the pole stands: mean of the observers, and its running mean",
                            .panels = {by_episode, by_time}};
  muster::write_svg(path, chart);
  std::printf("the curve is in %s\n", path.c_str());
}
