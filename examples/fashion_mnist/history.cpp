#include "history.h"

#include <muster/base/error.h>
#include <muster/comm/collectives.h>
#include <muster/train/plot.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

namespace {

std::string format(const char* pattern, ...) {
  char buffer[512];
  va_list arguments;
  va_start(arguments, pattern);
  std::vsnprintf(buffer, sizeof buffer, pattern, arguments);
  va_end(arguments);
  return buffer;
}

// 12,345
std::string with_commas(double number) {
  auto digits = format("%.0f", number);
  for (auto at = static_cast<int>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), 1, ',');
  return digits;
}

const char* plural(int64_t count) { return count == 1 ? "" : "s"; }

}  // namespace

void Tally::add(const torch::Tensor& output, const torch::Tensor& target, double loss) {
  loss_ += loss * static_cast<double>(target.numel());
  correct_ += output.argmax(1).eq(target).sum().item<int64_t>();
  images_ += target.numel();
}

Score Tally::score() const {
  auto sums = torch::tensor({loss_, static_cast<double>(correct_), static_cast<double>(images_)}, torch::kDouble);
  muster::all_reduce(sums);
  const auto* sum = sums.const_data_ptr<double>();
  return {.loss = sum[0] / sum[2], .accuracy = sum[1] / sum[2], .images = static_cast<int64_t>(sum[2])};
}

void History::begin_epoch() {
  epoch_losses_.clear();
  tally_ = {};
  blocked_before_ = world_.group().stats().blocked;
  began_ = Clock::now();
}

void History::step(const torch::Tensor& output, const torch::Tensor& target, double loss) {
  tally_.add(output, target, loss);
  epoch_losses_.push_back(loss);
}

void History::end_epoch() {
  time_ += Clock::now() - began_;
  // One collective an epoch, not one a step, brings the losses together. Its last element is the time blocked.
  epoch_losses_.push_back(std::chrono::duration<double>(world_.group().stats().blocked - blocked_before_).count());
  auto means = torch::tensor(epoch_losses_, torch::kDouble);
  muster::all_reduce(means, {.op = muster::ReduceOp::AVG});
  const auto* begin = means.const_data_ptr<double>();
  step_losses_.insert(step_losses_.end(), begin, begin + means.numel() - 1);
  blocked_ += begin[means.numel() - 1];
  train_.push_back(tally_.score());
  images_ += train_.back().images;
}

void History::test(const Score& score) { test_.push_back(score); }

void History::write_curves(const Flags& flags) const {
  const auto epochs = static_cast<double>(train_.size());
  // Single steps are mostly noise: faintly the means over short stretches of the training, boldly those over long ones
  // around them.
  const auto mean_around = [&](size_t step, size_t reach) {
    const size_t first = step - std::min(step, reach), last = std::min(step + reach + 1, step_losses_.size());
    double sum = 0;
    for (size_t i = first; i < last; ++i) sum += step_losses_[i];
    return sum / static_cast<double>(last - first);
  };
  muster::Series steps{.faint = true, .color = 0}, loss{.name = "training", .color = 0};
  const size_t stride = std::max<size_t>(1, step_losses_.size() / 200);
  for (size_t step = 0; step < step_losses_.size(); step += stride) {
    const double x = static_cast<double>(step) / static_cast<double>(step_losses_.size()) * epochs;
    steps.x.push_back(x);
    steps.y.push_back(mean_around(step, stride / 2));
    loss.x.push_back(x);
    loss.y.push_back(mean_around(step, std::min(step, step_losses_.size() / 50)));  // narrower where it falls steeply
  }
  muster::Series test_loss{.name = "test", .markers = true, .color = 1};
  muster::Series train_accuracy{.name = "training", .markers = true, .color = 0};
  muster::Series test_accuracy{.name = "test", .markers = true, .color = 1};
  for (size_t e = 0; e < train_.size(); ++e) {
    for (auto* series : {&test_loss, &train_accuracy, &test_accuracy}) series->x.push_back(static_cast<double>(e + 1));
    test_loss.y.push_back(test_[e].loss);
    train_accuracy.y.push_back(100 * train_[e].accuracy);
    test_accuracy.y.push_back(100 * test_[e].accuracy);
  }
  muster::Panel losses{
      .title = "Loss", .x_label = "epoch", .series = {steps, loss, test_loss}, .x_whole = true, .x_min = 0, .y_min = 0};
  muster::Panel accuracies{.title = "Accuracy",
                           .x_label = "epoch",
                           .series = {train_accuracy, test_accuracy},
                           .x_whole = true,
                           .y_unit = " %",
                           .x_min = 0};
  if (test_.back().loss < 0.5) losses.y_max = 1;  // the fall in the first steps would flatten all the rest

  const int ranks = world_.world_size();
  std::ostringstream about;
  about << ranks << " rank" << plural(ranks) << ", " << flags.epochs << " epoch" << plural(flags.epochs) << " of "
        << with_commas(static_cast<double>(images_) / epochs) << " images in batches of " << flags.batch << ", "
        << format("%.0f", seconds()) << " s of training at " << with_commas(images_per_second()) << " images/s";
  muster::write_svg(flags.out,
                    {.title = format("Fashion-MNIST: %.2f %% of the test images right", 100 * test_.back().accuracy),
                     .subtitle = about.str(),
                     .panels = {losses, accuracies}});
}

void History::write_json(const Flags& flags) const {
  nlohmann::json json{{"ranks", world_.world_size()},
                      {"epochs", flags.epochs},
                      {"batch", flags.batch},
                      {"seed", flags.seed},
                      {"accuracy", test_.back().accuracy},
                      {"test_images", test_.back().images},
                      {"seconds", seconds()},
                      {"samples_per_s", images_per_second()},
                      {"communication_share", blocked_ / seconds()},
                      {"losses", step_losses_}};
  for (const auto& score : train_) json["train_accuracy"].push_back(score.accuracy);
  for (const auto& score : test_) {
    json["test_accuracy"].push_back(score.accuracy);
    json["test_loss"].push_back(score.loss);
  }
  std::ofstream file(flags.json);
  file << json.dump() << '\n';
  file.close();
  if (!file)
    throw muster::Unavailable("cannot write " + flags.json.string(),
                              "Check that its folder exists and may be written to");
}

std::string History::table(const Flags& flags) const {
  const int ranks = world_.world_size();
  const auto& test = test_.back();
  std::ostringstream out;
  out << "\n  test accuracy       " << format("%.2f %%", 100 * test.accuracy) << "   of "
      << with_commas(static_cast<double>(test.images)) << " images, each counted once\n"
      << "  training time       " << format("%.1f s", seconds()) << "   " << flags.epochs << " epoch"
      << plural(flags.epochs) << " on " << ranks << " rank" << plural(ranks) << "\n"
      << "  samples/s           " << with_commas(images_per_second()) << "\n"
      << "  in communication    " << format("%.1f %%", 100 * blocked_ / seconds()) << "   of the training time\n"
      << "  loss and accuracy   " << flags.out.string() << "\n\n";
  return std::move(out).str();
}
