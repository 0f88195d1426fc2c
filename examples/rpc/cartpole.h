// CartPole: a pole stands on a cart, and falls unless the cart is pushed left and right in time.
//
// The equations of motion of A. G. Barto, R. S. Sutton and C. W. Anderson, "Neuronlike adaptive elements that can solve
// difficult learning control problems", IEEE Transactions on Systems, Man, and Cybernetics 13(5), 1983, without
// friction. The masses, lengths, limits and Euler's step of 20 ms are those of the Gym's CartPole-v1.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <random>

class CartPole {
 public:
  using State = std::array<float, 4>;          // position [m], velocity [m/s], angle [rad], angular velocity [rad/s]
  static constexpr int kLongestEpisode = 500;  // steps

  explicit CartPole(uint64_t seed) : random_(seed) {}

  // Begins a new episode, with a pole that is nearly upright.
  State reset() {
    for (double& each : now_) each = 0.1 * (std::generate_canonical<double, 53>(random_) - 0.5);
    steps_ = 0;
    return state();
  }

  struct Step {
    State state;
    float reward = 1;   // for each step that the pole stands
    bool over = false;  // it fell, the cart left the track, or the episode has been long enough
  };
  Step step(bool right) {
    constexpr double kGravity = 9.8, kCart = 1.0, kPole = 0.1, kHalfLength = 0.5, kForce = 10, kTime = 0.02;
    constexpr double kTrack = 2.4, kLean = 12 * std::numbers::pi / 180;
    auto& [x, speed, angle, turn] = now_;
    const double force = right ? kForce : -kForce;
    const double sine = std::sin(angle), cosine = std::cos(angle);
    const double push = (force + kPole * kHalfLength * turn * turn * sine) / (kCart + kPole);
    const double turning =
        (kGravity * sine - cosine * push) / (kHalfLength * (4.0 / 3 - kPole * cosine * cosine / (kCart + kPole)));
    const double speeding = push - kPole * kHalfLength * turning * cosine / (kCart + kPole);
    x += kTime * speed;
    speed += kTime * speeding;
    angle += kTime * turn;
    turn += kTime * turning;
    const bool fell = std::abs(x) > kTrack || std::abs(angle) > kLean;
    return {.state = state(), .over = fell || ++steps_ == kLongestEpisode};
  }

 private:
  State state() const {
    State state;
    for (size_t i = 0; i < state.size(); ++i) state[i] = static_cast<float>(now_[i]);
    return state;
  }

  std::mt19937_64 random_;
  std::array<double, 4> now_{};
  int steps_ = 0;
};
