// A language model on two workers: the RNN of PyTorch's tutorial "Getting Started with Distributed RPC Framework", on a
// real text.
//
//   muster run -n 2 autograd_rnn --check --curve perplexity.svg
//
// Worker 0, "ps", has the table of the words' vectors and the decoder. Worker 1, the trainer, has the LSTM between them
// and calls both. A step goes forward and backward through these calls, in its own context, and ends with one step of
// an optimizer that has parameters on both workers (rnn_model.h).
//
// A twin makes the first steps as well, alternating with the model: it is the same model with the same initial
// parameters, in the trainer's process and with libtorch alone. Its losses must be the same. The difference of the
// times is the remote cost.
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <muster/comm/world.h>
#include <muster/rpc/traffic.h>
#include <muster/rpc/worker.h>
#include <muster/train/plot.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "rnn_model.h"
#include "text.h"

namespace rpc = muster::rpc;

namespace {

struct Settings {
  std::string text;  // empty: a text that this machine has
  ModelSizes model;
  int epochs = 20, steps = 0;  // 0 steps: no limit but the epochs
  int64_t batch = 10, bptt = 20;
  int twin = 50;
  bool check = false;
  double tolerance = 1e-5;
  std::string curve;  // the picture, an SVG; empty: none
};

// Words [time, batch]: the text in `batch` columns. The remainder is cut off.
class Columns {
 public:
  Columns(const at::Tensor& words, int64_t batch)
      : words_(words.narrow(0, 0, words.size(0) / batch * batch).view({batch, -1}).t().contiguous()) {}

  // Calls each(x, y) for one stretch of the text after the other, until it returns false.
  template <typename F>
  void in_stretches(int64_t length, F&& each) const {
    const int64_t last = words_.size(0) - 1;
    for (int64_t at = 0; at < last; at += length) {
      const int64_t now = std::min(length, last - at);
      if (!each(words_.narrow(0, at, now), words_.narrow(0, at + 1, now))) return;
    }
  }

 private:
  const at::Tensor words_;
};

// Losses, times and traffic of the steps. For the first steps also the losses and times of the twin.
struct Steps {
  std::vector<double> loss, twin_loss, ms, twin_ms;
  double calls = 0, sent = 0, received = 0;  // over all steps

  void add(const rpc::Traffic& one) {
    calls += static_cast<double>(one.calls);
    sent += static_cast<double>(one.bytes_sent);
    received += static_cast<double>(one.bytes_received);
  }
  std::vector<double> compared_ms() const {
    return {ms.begin(), ms.begin() + static_cast<std::ptrdiff_t>(twin_ms.size())};
  }
  // The largest difference between the losses; NaN if a loss is NaN.
  double apart() const {
    double largest = 0;
    for (size_t i = 0; i < twin_loss.size(); ++i) {
      const double here = std::abs(loss[i] - twin_loss[i]);
      if (!(here <= largest)) largest = here;
      if (std::isnan(largest)) break;
    }
    return largest;
  }
};

template <typename F>
double ms_of(F&& what) {
  const auto start = std::chrono::steady_clock::now();
  what();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double mean(const std::vector<double>& values, size_t from = 0) {
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(from), values.end(), 0.0) /
         static_cast<double>(values.size() - from);
}

double perplexity_of(Recurrent& model, const Columns& columns, const Settings& settings) {
  const at::NoGradGuard no_grad;
  auto hidden = model.zeros(settings.batch);
  double sum = 0;
  int64_t words = 0;
  columns.in_stretches(settings.bptt, [&](const at::Tensor& x, const at::Tensor& y) {
    sum += model.loss(x, y, hidden, false).item<double>() * static_cast<double>(x.numel());
    words += x.numel();
    return true;
  });
  return std::exp(sum / static_cast<double>(words));
}

struct Perplexities {
  std::vector<double> training, held_back;  // after each epoch
};

void print_costs(const Steps& steps) {
  const size_t compared = steps.twin_loss.size();
  std::printf("loss after %zu steps: %.7f, of the twin %.7f; at most %.1e apart in all of them\n", compared,
              steps.loss[compared - 1], steps.twin_loss.back(), steps.apart());
  const std::vector<double> ms = steps.compared_ms();
  const double both[] = {median(ms), median(steps.twin_ms)}, n = static_cast<double>(steps.loss.size());
  const double best[] = {*std::min_element(ms.begin(), ms.end()),
                         *std::min_element(steps.twin_ms.begin(), steps.twin_ms.end())};
  std::printf("a step: %.3f ms, of the twin %.3f ms, remote cost %.3f ms (medians of %zu)\n", both[0], both[1],
              both[0] - both[1], compared);
  std::printf("the best step: %.3f ms, of the twin %.3f ms, remote cost %.3f ms\n", best[0], best[1],
              best[0] - best[1]);
  std::printf("the trainer in a step: %.2f calls, %.1f KiB sent, %.1f KiB received\n", steps.calls / n,
              steps.sent / n / 1024, steps.received / n / 1024);
}

// The times, sorted, over the share of steps that took no longer. On a busy machine the left end says more than a mean.
muster::Series sorted(const std::string& name, std::vector<double> ms) {
  std::sort(ms.begin(), ms.end());
  std::vector<double> share(ms.size());
  for (size_t i = 0; i < ms.size(); ++i) share[i] = 100 * static_cast<double>(i + 1) / static_cast<double>(ms.size());
  return {.name = name, .x = share, .y = ms};
}

void draw(const std::string& path, const std::string& text, const Perplexities& perplexities, const Steps& steps) {
  std::vector<double> epochs(perplexities.training.size());
  std::iota(epochs.begin(), epochs.end(), 1);
  const muster::Panel learned{
      .title = "perplexity",
      .x_label = "epoch",
      .series = {{.name = "training", .x = epochs, .y = perplexities.training, .markers = true},
                 {.name = "held back", .x = epochs, .y = perplexities.held_back, .markers = true}},
      .x_whole = true,
      .y_min = 0};
  const muster::Panel times{
      .title = "time of a step, ms",
      .x_label = "% of the steps take no longer",
      .series = {sorted("two workers", steps.compared_ms()), sorted("one process", steps.twin_ms)},
      .x_min = 0,
      .y_min = 0,
      .y_max = 3 * median(steps.compared_ms())};
  muster::write_svg(path, {.title = "A language model on two workers", .subtitle = text, .panels = {learned, times}});
  std::printf("the curve is in %s\n", path.c_str());
}

// Returns whether the losses were the same.
bool train(const Settings& settings, const Text& text) {
  const int64_t held = text.words.size(0) / 10;  // the last tenth
  const Columns training(text.words.narrow(0, 0, text.words.size(0) - held), settings.batch);
  const Columns held_back(text.words.narrow(0, text.words.size(0) - held, held), settings.batch);
  ModelSizes sizes = settings.model;
  sizes.words = text.vocabulary;
  DistributedModel model(sizes);
  LocalModel twin(sizes);

  Steps steps;
  Perplexities perplexities;
  const auto over = [&] { return settings.steps != 0 && static_cast<int>(steps.loss.size()) >= settings.steps; };
  for (int epoch = 1; epoch <= settings.epochs && !over(); ++epoch) {
    auto hidden = model.recurrent().zeros(settings.batch), of_twin = hidden;
    const size_t before = steps.loss.size();
    training.in_stretches(settings.bptt, [&](const at::Tensor& x, const at::Tensor& y) {
      const rpc::Traffic before_it = rpc::traffic();
      steps.ms.push_back(ms_of([&] { steps.loss.push_back(model.step(x, y, hidden)); }));
      steps.add(rpc::traffic() - before_it);
      if (static_cast<int>(steps.loss.size()) <= settings.twin)
        steps.twin_ms.push_back(ms_of([&] { steps.twin_loss.push_back(twin.step(x, y, of_twin)); }));
      return !over();
    });
    perplexities.training.push_back(std::exp(mean(steps.loss, before)));
    perplexities.held_back.push_back(perplexity_of(model.recurrent(), held_back, settings));
    std::printf("epoch %d: perplexity %.2f, of what is held back %.2f\n", epoch, perplexities.training.back(),
                perplexities.held_back.back());
    std::fflush(stdout);
  }
  print_costs(steps);
  if (!settings.curve.empty()) draw(settings.curve, text.path, perplexities, steps);
  return steps.apart() <= settings.tolerance;
}

// Does all of the trainer's work. Returns the exit status.
int run_trainer(const Settings& settings) {
  std::optional<Text> text;
  try {
    text = read_text(settings.text.empty() ? text_of_this_machine() : settings.text);
    if (const int64_t needed = 20 * settings.batch; text->words.size(0) < needed)
      throw muster::InvalidArgument("the text " + text->path + " has " + std::to_string(text->words.size(0)) +
                                        " words, and must have " + std::to_string(needed),
                                    "Give a longer one by --text FILE, or a smaller --batch");
  } catch (const muster::Error& error) {
    std::fprintf(stderr, "autograd_rnn: %s\n", error.what());
    return 2;
  }
  std::printf("text: %s, %ld words, %ld different ones\n", text->path.c_str(), static_cast<long>(text->words.size(0)),
              static_cast<long>(text->vocabulary));
  if (train(settings, *text) || !settings.check) return 0;
  std::fprintf(stderr, "autograd_rnn: the losses differ by more than %g from those in one process\n",
               settings.tolerance);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  Settings settings;
  ModelSizes& model = settings.model;
  CLI::App app("A language model with its embedding and its decoder on a parameter server");
  const auto count = [&](const char* name, auto& value, const char* what, int low, int high) {
    app.add_option(name, value, what)->check(CLI::Range(low, high))->capture_default_str();
  };
  app.add_option("--text", settings.text, "the text to learn; default: a licence of Debian")->type_name("FILE");
  count("--epochs", settings.epochs, "times to go through the text", 1, 100000);
  count("--steps", settings.steps, "stop after so many steps; 0: do not", 0, 1000000);
  count("--batch", settings.batch, "columns of the text that are read at the same time", 1, 10000);
  count("--bptt", settings.bptt, "words that a gradient goes back through", 1, 10000);
  count("--embedding", model.embedding, "size of a word's vector", 1, 16384);
  count("--hidden", model.hidden, "size of the LSTM", 1, 16384);
  count("--layers", model.layers, "layers of the LSTM", 1, 64);
  app.add_option("--dropout", model.dropout, "rate")->check(CLI::Range(0.0, 0.99))->capture_default_str();
  app.add_option("--lr", model.lr, "learning rate")->check(CLI::Range(0.0, 1e6))->capture_default_str();
  app.add_option("--seed", model.seed, "seed of weights and dropout")->capture_default_str();
  count("--twin", settings.twin, "steps that the model in one process makes, too", 1, 1000000);
  app.add_flag("--check", settings.check, "fail if the twin has other losses");
  app.add_option("--tolerance", settings.tolerance, "largest difference that --check accepts")
      ->check(CLI::Range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--curve,--out", settings.curve, "draw perplexities and times in this file")->type_name("FILE.svg");
  CLI11_PARSE(app, argc, argv);

  at::set_num_threads(1);
  auto world = muster::init();
  if (world.world_size() != 2) {
    if (world.rank() == 0) std::fprintf(stderr, "autograd_rnn: needs two workers: muster run -n 2 autograd_rnn\n");
    return 2;
  }
  rpc::init({.name = world.rank() == 0 ? "ps" : "trainer"});
  const int status = world.rank() == 1 ? run_trainer(settings) : 0;
  rpc::shutdown();
  return status;
}
