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

torch::Tensor Tally::numbers() const {
  return torch::tensor({loss_, static_cast<double>(correct_), static_cast<double>(images_)}, torch::kDouble);
}

void Tally::set(const torch::Tensor& numbers) {
  const auto* number = numbers.const_data_ptr<double>();
  loss_ = number[0];
  correct_ = static_cast<int64_t>(number[1]);
  images_ = static_cast<int64_t>(number[2]);
}

void Tally::add(const Tally& other) {
  loss_ += other.loss_;
  correct_ += other.correct_;
  images_ += other.images_;
}

Score Tally::own_score() const {
  const auto images = static_cast<double>(images_);
  return {.loss = loss_ / images, .accuracy = static_cast<double>(correct_) / images, .images = images_};
}

Score Tally::score() const {
  auto sums = numbers();
  muster::all_reduce(sums);
  Tally all;
  all.set(sums);
  return all.own_score();
}

void History::begin_epoch() {
  blocked_before_ = world_->group().stats().blocked;
  began_ = Clock::now();
}

void History::step(const torch::Tensor& output, const torch::Tensor& target, double loss) {
  images_ += target.numel() * ranks_;
  if (!together_) {
    tally_.add(output, target, loss);
    epoch_losses_.push_back(loss);
    return;
  }
  Tally step;
  step.add(output, target, loss);
  auto sums = step.numbers();
  muster::all_reduce(sums);
  step.set(sums);
  tally_.add(step);
  epoch_losses_.push_back(step.own_score().loss);
}

void History::end_epoch() {
  time_ += Clock::now() - began_;
  // One collective per epoch, not per step, combines the losses. Its last element is the time that the rank was
  // blocked.
  epoch_losses_.push_back(std::chrono::duration<double>(world_->group().stats().blocked - blocked_before_).count());
  auto means = torch::tensor(epoch_losses_, torch::kDouble);
  if (!together_) muster::all_reduce(means, {.op = muster::ReduceOp::AVG});
  const auto* begin = means.const_data_ptr<double>();
  step_losses_.insert(step_losses_.end(), begin, begin + means.numel() - 1);
  blocked_ += begin[means.numel() - 1];
  train_.push_back(together_ ? tally_.own_score() : tally_.score());
  epoch_losses_.clear();
  tally_ = {};
}

void History::test(const Score& score) { test_.push_back(score); }

void History::save(torch::serialize::OutputArchive& archive) const {
  const auto scores = [](const std::vector<Score>& of) {
    std::vector<double> numbers;
    for (const auto& score : of)
      numbers.insert(numbers.end(), {score.loss, score.accuracy, static_cast<double>(score.images)});
    return torch::IValue(numbers);
  };
  archive.write("step losses", torch::IValue(step_losses_));
  archive.write("epoch losses", torch::IValue(epoch_losses_));
  archive.write("train", scores(train_));
  archive.write("test", scores(test_));
  archive.write("tally", tally_.numbers());
}

void History::load(torch::serialize::InputArchive& archive) {
  const auto numbers = [&](const char* key) {
    torch::IValue value;
    archive.read(key, value);
    return value.toDoubleVector();
  };
  const auto scores = [&](const char* key) {
    std::vector<Score> list;
    const auto all = numbers(key);
    for (size_t i = 0; i + 3 <= all.size(); i += 3)
      list.push_back({.loss = all[i], .accuracy = all[i + 1], .images = static_cast<int64_t>(all[i + 2])});
    return list;
  };
  step_losses_ = numbers("step losses");
  epoch_losses_ = numbers("epoch losses");
  train_ = scores("train");
  test_ = scores("test");
  torch::Tensor tally;
  archive.read("tally", tally);
  tally_.set(tally);
}

void History::write_curves(const Flags& flags) const {
  const auto epochs = static_cast<double>(train_.size());
  // Single steps are mostly noise. So the faint line shows the means over short stretches of the training, and the bold
  // line the means over long stretches.
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
    loss.y.push_back(mean_around(step, std::min(step, step_losses_.size() / 50)));  // narrower at the steep start
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
  if (test_.back().loss < 0.5) losses.y_max = 1;  // else the first steps' fall would flatten the rest

  const int ranks = ranks_;
  std::ostringstream about;
  about << ranks << " rank" << plural(ranks) << ", " << flags.epochs << " epoch" << plural(flags.epochs) << " of "
        << with_commas(static_cast<double>(train_.back().images)) << " images in batches of " << flags.batch << ", "
        << format("%.0f", seconds()) << " s of training at " << with_commas(images_per_second()) << " images/s";
  muster::write_svg(flags.out,
                    {.title = format("Fashion-MNIST: %.2f %% of the test images right", 100 * test_.back().accuracy),
                     .subtitle = about.str(),
                     .panels = {losses, accuracies}});
}

void History::write_json(const Flags& flags) const {
  nlohmann::json json{{"ranks", ranks_},
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
    throw muster::Unavailable("cannot write " + flags.json.string(), "Check that its folder exists and is writable");
}

std::string History::table(const Flags& flags) const {
  const int ranks = ranks_;
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
