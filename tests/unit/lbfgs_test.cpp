// muster::LBFGS: the parameters of Python's, states that go on to the bit, and ranks that equal one process.
#include "muster/optim/lbfgs.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/serialize.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/ddp.h"
#include "support/ask_python.h"
#include "support/full_run.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace muster::test::lbfgs {
namespace {

using at::Tensor;
using optim::LBFGSOptions;
using optim::LineSearch;
using Tensors = std::vector<Tensor>;
constexpr auto kWolfe = LineSearch::kStrongWolfe;

// --- what is minimized; lbfgs_reference.py has the same ---

Tensor numbers(double begin, double end, at::IntArrayRef shape, at::ScalarType dtype) {
  return at::linspace(begin, end, c10::multiply_integers(shape), at::kDouble).to(dtype).view(shape);
}

struct Problem {
  Tensors parameters;
  std::function<Tensor()> loss;
};
Problem problem(const std::string& name, at::ScalarType dtype) {
  const auto constant = [=](double begin, double end, at::IntArrayRef shape) {
    return numbers(begin, end, shape, dtype);
  };
  const auto parameter = [=](double begin, double end, at::IntArrayRef shape) {
    return numbers(begin, end, shape, dtype).requires_grad_();
  };
  if (name == "convex") {
    const Tensor w = parameter(-1, 2, {7}), unused = parameter(0, 1, {2, 2});
    const Tensor a = at::cos(constant(0, 50, {20, 7})), b = at::sin(constant(0, 9, {20}));
    return {{unused, w}, [=] { return (at::matmul(a, w) - b).square().sum() + 0.1 * w.pow(4).sum(); }};
  }
  if (name == "net") {
    const Tensor x = at::sin(constant(0, 70, {32, 3}));
    const Tensor y = at::cos(at::matmul(x, constant(-1, 1, {3, 2})) * 2);
    const Tensor inner = parameter(-1, 1, {8, 3}), bias = parameter(-0.5, 0.5, {8}), outer = parameter(-0.7, 1, {2, 8});
    return {{inner, bias, outer},
            [=] { return (at::matmul(at::tanh(at::matmul(x, inner.t()) + bias), outer.t()) - y).square().mean(); }};
  }
  if (name == "valley") {  // Rosenbrock's: curved, and flat along its bottom
    const Tensor w = parameter(-1.2, 1, {6});
    return {{w}, [=] {
              const Tensor from = w.slice(0, 0, 5), to = w.slice(0, 1);
              return (100 * (to - from.square()).square() + (1 - from).square()).sum();
            }};
  }
  if (name == "complex") {
    const Tensor z = at::complex(constant(-1, 1, {4}), constant(0.5, -0.3, {4})).requires_grad_();
    const Tensor u = parameter(-1, 1, {4});
    const Tensor c = at::complex(at::cos(constant(0, 20, {6, 4})), at::sin(constant(0, 13, {6, 4})));
    return {{z, u}, [=] {
              return (at::matmul(c, z) - 1).abs().square().sum() + (u - at::real(z)).square().sum() +
                     0.1 * u.pow(4).sum();
            }};
  }
  const Tensor w = parameter(-1, 2, {6, 3}), t = at::cos(constant(0, 9, {5, 3}));  // "sparse"
  const Tensor rows = at::tensor({0, 2, 2, 5, 1}, at::kLong);
  return {{w},
          [=] { return (at::embedding(w, rows, -1, /*scale_grad_by_freq=*/false, /*sparse=*/true) - t).pow(4).sum(); }};
}

void make_steps(torch::optim::Optimizer& optimizer, const Problem& problem, int count) {
  for (int step = 0; step < count; ++step)
    optimizer.step([&] {
      optimizer.zero_grad();
      Tensor loss = problem.loss();
      loss.backward();
      return loss;
    });
}

void copy_values(const Tensors& from, const Tensors& to) {
  for (size_t i = 0; i < from.size(); ++i) to[i].detach().copy_(from[i].detach());
}
void expect_equal(const Tensors& a, const Tensors& b, const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << what << ", parameter " << i;
}
double farthest_of(const Tensors& a, const Tensors& b) {
  double most = 0;
  for (size_t i = 0; i < a.size(); ++i) most = std::max(most, (a[i] - b[i]).abs().max().item<double>());
  return most;
}

int64_t calls_of(muster::LBFGS& optimizer) { return optimizer.state_dict().at("state.0.func_evals").item<int64_t>(); }

class Lbfgs : public testing::Test {
 protected:
  void SetUp() override { at::set_num_threads(1); }
};

// --- Python ---

struct Case {
  const char* problem;
  const char* python;
  LBFGSOptions options;
};
std::vector<Case> cases() {
  return {
      {"convex", "lr=0.02", {.lr = 0.02}},
      {"convex", "line_search_fn='strong_wolfe'", {.line_search_fn = kWolfe}},
      {"convex", "lr=0.3, max_iter=3, max_eval=2", {.lr = 0.3, .max_iter = 3, .max_eval = 2}},
      {"net", "lr=0.1, max_iter=4, history_size=5", {.lr = 0.1, .max_iter = 4, .history_size = 5}},
      {"net",
       "lr=0.1, max_iter=4, history_size=5, line_search_fn='strong_wolfe'",
       {.lr = 0.1, .max_iter = 4, .history_size = 5, .line_search_fn = kWolfe}},
      {"net",
       "max_iter=6, max_eval=3, tolerance_grad=1e-3, tolerance_change=1e-5, line_search_fn='strong_wolfe'",
       {.max_iter = 6, .max_eval = 3, .tolerance_grad = 1e-3, .tolerance_change = 1e-5, .line_search_fn = kWolfe}},
      {"net", "max_iter=1, line_search_fn='strong_wolfe'", {.max_iter = 1, .line_search_fn = kWolfe}},
      {"valley", "lr=0.001, max_iter=5", {.lr = 0.001, .max_iter = 5}},
      {"valley",
       "lr=10, max_iter=3, max_eval=30, line_search_fn='strong_wolfe'",
       {.lr = 10, .max_iter = 3, .max_eval = 30, .line_search_fn = kWolfe}},
      {"valley",
       "lr=0.01, max_iter=2, max_eval=50, history_size=1, line_search_fn='strong_wolfe'",
       {.lr = 0.01, .max_iter = 2, .max_eval = 50, .history_size = 1, .line_search_fn = kWolfe}},
      {"complex", "lr=0.05, max_iter=3", {.lr = 0.05, .max_iter = 3}},
      {"complex", "max_iter=3, line_search_fn='strong_wolfe'", {.max_iter = 3, .line_search_fn = kWolfe}},
      {"sparse", "lr=0.05, max_iter=3", {.lr = 0.05, .max_iter = 3}},
      {"sparse", "max_iter=3, line_search_fn='strong_wolfe'", {.max_iter = 3, .line_search_fn = kWolfe}},
  };
}

const char* name_of(at::ScalarType dtype) { return dtype == at::kDouble ? "float64" : "float32"; }

// One run of Python answers all, because it needs seconds to begin.
//   - Steps of all cases, here and there: 20 in the gate, 100 in the full run.
//   - Five steps here, five in Python, and five here.
TEST_F(Lbfgs, EqualsPythonAlsoFromItsState) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch";
  const auto tolerance = [](at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 1e-6; };
  const int steps = full_run() ? 100 : 20;
  std::vector<std::string> lines;
  struct Run {
    std::vector<double> counts, values;
    at::ScalarType dtype;
  };
  std::vector<Run> runs;
  for (const auto& [name, python, options] : cases())
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const Problem here = problem(name, dtype);
      muster::LBFGS optimizer(here.parameters, options);
      Run& run = runs.emplace_back(Run{.dtype = dtype});
      for (int tenth = 0; tenth < 10; ++tenth) {
        make_steps(optimizer, here, steps / 10);
        for (const Tensor& each : here.parameters) {
          const Tensor values = optim::as_real(each.detach()).to(at::kDouble).contiguous();
          run.values.insert(run.values.end(), values.const_data_ptr<double>(),
                            values.const_data_ptr<double>() + values.numel());
        }
      }
      const auto state = optimizer.state_dict();
      for (const char* const count : {"func_evals", "n_iter"})
        run.counts.push_back(state.at(text("state.0.", count)).to(at::kDouble).item<double>());
      lines.push_back(text("run|", name, "|", name_of(dtype), "|", python, "|", steps));
    }
  const TemporaryFolder folder;
  struct Exchange {
    Case of;
    at::ScalarType dtype;
    std::string file;
  };
  std::vector<Exchange> exchanges;
  for (const Case& each : {cases()[3], cases()[4], cases()[6], cases()[8]})
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const Problem here = problem(each.problem, dtype);
      muster::LBFGS optimizer(here.parameters, each.options);
      make_steps(optimizer, here, 5);
      auto all = optimizer.state_dict();
      for (size_t i = 0; i < here.parameters.size(); ++i) all[text("parameters.", i)] = here.parameters[i].detach();
      const std::string file = (folder / text(exchanges.size())).string();
      save_safetensors(file, all);
      exchanges.push_back({each, dtype, file + ".python"});
      lines.push_back(text("go on|", each.problem, "|", name_of(dtype), "|", file, "|", file + ".python", "|5"));
    }

  const auto answers = ask_python("unit/lbfgs_reference.py", lines);
  ASSERT_EQ(answers.size(), lines.size());
  for (size_t i = 0; i < runs.size(); ++i) {
    const auto& theirs = answers[i];
    ASSERT_GT(theirs.size(), 2u) << lines[i];
    EXPECT_EQ(runs[i].counts, std::vector<double>(theirs.begin(), theirs.begin() + 2)) << lines[i];
    EXPECT_LE(farthest(runs[i].values, {theirs.begin() + 2, theirs.end()}), tolerance(runs[i].dtype)) << lines[i];
  }
  for (const auto& [each, dtype, name] : exchanges) {
    const std::string what = text(each.problem, ", ", each.python, ", ", name_of(dtype));
    const Problem straight = problem(each.problem, dtype), here = problem(each.problem, dtype);
    muster::LBFGS whole(straight.parameters, each.options), optimizer(here.parameters);
    make_steps(whole, straight, 10);
    const SafetensorsFile file(name);
    std::map<std::string, Tensor> state;
    for (const std::string& key : file.names()) state[key] = file.tensor(key);
    Tensors python;
    for (size_t i = 0; i < here.parameters.size(); ++i)
      python.push_back(state.extract(text("parameters.", i)).mapped());
    EXPECT_LE(farthest_of(straight.parameters, python), tolerance(dtype)) << what;
    copy_values(python, here.parameters);
    optimizer.load_state_dict(state);
    EXPECT_EQ(calls_of(optimizer), calls_of(whole)) << what;
    make_steps(whole, straight, 5);
    make_steps(optimizer, here, 5);
    EXPECT_LE(farthest_of(straight.parameters, here.parameters), tolerance(dtype)) << what;
    EXPECT_EQ(calls_of(optimizer), calls_of(whole)) << what;
  }
}

// --- states ---

// `steps` before and after; fn(from, to) brings a state into an optimizer that was made with default options.
void expect_same_bits(int steps, const std::function<void(muster::LBFGS& from, muster::LBFGS& to)>& bring) {
  for (const Case& each : cases())
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      const std::string what = text(each.problem, ", ", each.python, ", ", name_of(dtype), ", ", steps, " steps");
      const Problem straight = problem(each.problem, dtype), cut = problem(each.problem, dtype),
                    other = problem(each.problem, dtype);
      muster::LBFGS whole(straight.parameters, each.options), first(cut.parameters, each.options),
          second(other.parameters);
      make_steps(whole, straight, steps + 5);
      make_steps(first, cut, steps);
      make_steps(second, other, 1);  // a state that must not stay
      bring(first, second);
      copy_values(cut.parameters, other.parameters);
      make_steps(first, cut, 1);  // does not reach what was saved
      make_steps(second, other, 5);
      expect_equal(straight.parameters, other.parameters, what);
      EXPECT_EQ(calls_of(second), calls_of(whole)) << what;
      EXPECT_EQ(second.options().lr, each.options.lr) << what;
      EXPECT_EQ(second.options().history_size, each.options.history_size) << what;
      EXPECT_EQ(second.options().line_search_fn, each.options.line_search_fn) << what;
    }
}

TEST_F(Lbfgs, ArchivesGoOnToTheBit) {
  for (const int steps : {0, 1, 5})
    expect_same_bits(steps, [](muster::LBFGS& from, muster::LBFGS& to) {
      std::stringstream bytes;
      torch::save(from, bytes);
      torch::load(to, bytes);
    });
}

TEST_F(Lbfgs, StateDictsGoOnToTheBit) {
  for (const int steps : {0, 1, 5})
    expect_same_bits(steps, [](muster::LBFGS& from, muster::LBFGS& to) { to.load_state_dict(from.state_dict()); });
}

TEST_F(Lbfgs, SnapshotsGoOnToTheBit) {
  const TemporaryFolder folders;
  int number = 0;
  expect_same_bits(5, [&](muster::LBFGS& from, muster::LBFGS& to) {
    const SnapshotOptions options{.folder = folders / text(number++), .on_sigterm = false, .default_generator = false};
    run_threads(1, [&](World&) {
      Snapshot snapshot(options);
      snapshot.add("optimizer", from);
      EXPECT_EQ(snapshot.restore(), 0);
      snapshot.save(5);
    });
    run_threads(1, [&](World&) {
      Snapshot snapshot(options);
      snapshot.add("optimizer", to);
      EXPECT_EQ(snapshot.restore(), 5);
    });
  });
}

TEST_F(Lbfgs, AStateWithoutADirection) {
  const Tensor w = at::zeros({3}, at::kDouble).requires_grad_();
  const Problem at_its_minimum{{w}, [&] { return w.square().sum(); }};
  muster::LBFGS optimizer({w}), other({at::zeros({3}, at::kDouble).requires_grad_()});
  make_steps(optimizer, at_its_minimum, 2);
  EXPECT_TRUE(at::equal(w, at::zeros({3}, at::kDouble)));
  const auto state = optimizer.state_dict();
  EXPECT_EQ(state.at("state.0.func_evals").item<int64_t>(), 2);
  EXPECT_EQ(state.at("state.0.n_iter").item<int64_t>(), 0);
  EXPECT_FALSE(state.contains("state.0.d"));
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  torch::load(other, bytes);
  EXPECT_EQ(calls_of(other), 2);
}

TEST_F(Lbfgs, StatesThatDoNotFitAreRefused) {
  const Problem here = problem("convex", at::kDouble);
  muster::LBFGS optimizer(here.parameters, {.lr = 0.1});
  make_steps(optimizer, here, 1);
  const auto good = optimizer.state_dict();
  EXPECT_EQ(good.size(), 7 + 10u);
  EXPECT_EQ(good.at("state.0.d").sizes(), at::IntArrayRef({11}));
  const auto pairs = good.at("state.0.ro").numel();
  const auto refused = [&](const std::string& name, const Tensor& tensor, const char* what) {
    auto bad = good;
    bad["param_groups.0.lr"] = at::scalar_tensor(0.5, at::kDouble);
    bad[name] = tensor;
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { optimizer.load_state_dict(bad); }), what);
    EXPECT_EQ(optimizer.options().lr, 0.1);
    for (const auto& [key, value] : optimizer.state_dict()) EXPECT_TRUE(at::equal(value, good.at(key))) << key;
  };
  refused("state.0.exp_avg", at::zeros({11}), "has no 'exp_avg'");
  refused("state.1.d", at::zeros({11}), "no 'state.1.d'");
  refused("param_groups.0.betas", at::zeros({2}), "no 'param_groups.0.betas'");
  refused("param_groups.0.max_iter", at::scalar_tensor(0), "max_iter is 0");
  for (const double not_whole : {2.5, double{NAN}, 1e300})
    refused("param_groups.0.max_iter", at::scalar_tensor(not_whole, at::kDouble), "but must be a whole number");
  refused("param_groups.0.lr", at::zeros({1}), "'param_groups.0.lr' is not a tensor without dimensions");
  refused("state.0.d", at::zeros({12}, at::kDouble), "prev_flat_grad of shape [11], but needs [12]");
  refused("state.0.d", Tensor(), "has no d");
  refused("state.0.old_dirs", at::zeros({pairs, 7}), "old_dirs of shape");
  refused("state.0.ro", at::ones({pairs + 1}), "old_dirs of shape");
  refused("state.0.n_iter", at::scalar_tensor(-1, at::kLong), "n_iter = -1");
  refused("state.0.n_iter", at::scalar_tensor(0, at::kLong), "after 0 directions has no 'H_diag'");
  // Of other parameters, as a dictionary and as an archive.
  const Problem other = problem("valley", at::kDouble);
  muster::LBFGS theirs(other.parameters, {.lr = 0.3});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { theirs.load_state_dict(good); }),
                  "is for 11 numbers, and its parameters have 6");
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  muster::LBFGS two({at::ones({3}).requires_grad_(), at::ones({4}).requires_grad_()}, {.lr = 0.3});
  std::stringstream again(bytes.str());
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { torch::load(two, again); }), "is for 11 numbers");
  EXPECT_EQ(two.options().lr, 0.3);
  EXPECT_TRUE(two.state().empty());
  std::stringstream once_more(bytes.str());
  EXPECT_THROW(torch::load(theirs, once_more), c10::Error);
  EXPECT_EQ(theirs.options().lr, 0.3);
  muster::Adam adam(here.parameters);
  make_steps(adam, here, 1);
  std::stringstream of_adam;
  torch::save(adam, of_adam);
  EXPECT_CONTAINS(message_of<CorruptError>([&] { torch::load(optimizer, of_adam); }), "the state of an LBFGS");
  for (const auto& [key, value] : optimizer.state_dict()) EXPECT_TRUE(at::equal(value, good.at(key))) << key;
}

// A state of floats goes on in doubles, as in Python.
TEST_F(Lbfgs, AStateTakesTheDtypeOfTheParameters) {
  const Problem floats = problem("net", at::kFloat), doubles = problem("net", at::kDouble);
  muster::LBFGS from(floats.parameters, {.max_iter = 3, .line_search_fn = kWolfe}), to(doubles.parameters);
  make_steps(from, floats, 2);
  to.load_state_dict(from.state_dict());
  const auto state = to.state_dict();
  for (const char* const name : {"d", "old_dirs", "old_stps", "ro", "prev_flat_grad"})
    EXPECT_EQ(state.at(text("state.0.", name)).scalar_type(), at::kDouble) << name;
  const double before = doubles.loss().item<double>();
  make_steps(to, doubles, 1);
  EXPECT_LT(doubles.loss().item<double>(), before);
}

// --- steps ---

TEST_F(Lbfgs, StepReturnsTheFirstLossAndCallsWithGradients) {
  const Problem here = problem("convex", at::kDouble);
  muster::LBFGS optimizer(here.parameters, {.max_iter = 4, .max_eval = 7, .line_search_fn = kWolfe});
  std::vector<double> losses;
  const at::NoGradGuard no_grad;
  const Tensor loss = optimizer.step([&] {
    optimizer.zero_grad();
    Tensor value = here.loss();
    value.backward();
    losses.push_back(value.item<double>());
    return value;
  });
  EXPECT_EQ(loss.item<double>(), losses.front());
  EXPECT_LT(losses.back(), losses.front());
  EXPECT_EQ(std::ssize(losses), calls_of(optimizer));
  EXPECT_LE(losses.size(), 8u);
  EXPECT_EQ(optimizer.options().max_eval, 7);
  EXPECT_EQ(muster::LBFGS(here.parameters, {.max_iter = 6}).options().max_eval, 7);  // 6 * 5 / 4
}

TEST_F(Lbfgs, AShorterHistoryForgets) {
  const Problem here = problem("net", at::kDouble);
  muster::LBFGS optimizer(here.parameters, {.lr = 0.1, .max_iter = 8});
  make_steps(optimizer, here, 2);
  EXPECT_GT(optimizer.state_dict().at("state.0.ro").numel(), 3);
  optimizer.options().history_size = 3;
  make_steps(optimizer, here, 1);
  EXPECT_EQ(optimizer.state_dict().at("state.0.ro").numel(), 3);
}

TEST_F(Lbfgs, AScheduleSetsItsRate) {
  const Problem here = problem("net", at::kDouble);
  muster::LBFGS optimizer(here.parameters, {.lr = 0.5});
  torch::optim::StepLR schedule(optimizer, 1, 0.5);  // libtorch's
  schedule.step();                                   // of epoch 0
  schedule.step();
  EXPECT_EQ(optimizer.options().lr, 0.25);
}

TEST_F(Lbfgs, AClosureThatThrowsLeavesTheState) {
  for (const auto search : {LineSearch::kNone, kWolfe})
    for (const int steps_before : {0, 2}) {
      const Problem here = problem("net", at::kDouble);
      muster::LBFGS optimizer(here.parameters, {.lr = 0.1, .max_iter = 5, .line_search_fn = search});
      make_steps(optimizer, here, steps_before);
      const auto before = optimizer.state_dict();
      for (int good_calls = 0; good_calls < 3; ++good_calls) {
        const std::string what = text("after ", steps_before, " steps and ", good_calls, " calls");
        int calls = 0;
        Tensors seen;
        const auto closure = [&] {
          optimizer.zero_grad();
          seen.clear();
          for (const Tensor& each : here.parameters) seen.push_back(each.detach().clone());
          if (calls++ == good_calls) throw std::runtime_error("no more");
          Tensor loss = here.loss();
          loss.backward();
          return loss;
        };
        EXPECT_THROW(optimizer.step(closure), std::runtime_error);
        EXPECT_EQ(calls, good_calls + 1);
        expect_equal(here.parameters, seen, what);
        const auto after = optimizer.state_dict();
        EXPECT_EQ(after.size(), before.size()) << what;
        for (const auto& [key, value] : before) EXPECT_TRUE(at::equal(value, after.at(key))) << what << ", " << key;
      }
    }
}

TEST_F(Lbfgs, BadUseIsRefused) {
  const Problem here = problem("convex", at::kDouble);
  const Tensor unused = here.parameters[0], w = here.parameters[1];
  muster::LBFGS optimizer(here.parameters);
  const auto refused = [&](const char* what, const std::function<void()>& fn) {
    EXPECT_CONTAINS(message_of<InvalidArgument>(fn), what);
    expect_equal(here.parameters, problem("convex", at::kDouble).parameters, what);
  };
  torch::optim::Optimizer& base = optimizer;
  refused("Call step(closure)", [&] { base.step(); });
  refused("no tensor, but must return one real number", [&] { optimizer.step([] { return Tensor(); }); });
  refused("a tensor of shape [7]", [&] { optimizer.step([&] { return w; }); });
  refused("lr is -1", [&] { muster::LBFGS(here.parameters, {.lr = -1}); });
  refused("max_iter is 0", [&] { muster::LBFGS(here.parameters, {.max_iter = 0}); });
  refused("max_iter is 9.22337e+18", [&] { muster::LBFGS(here.parameters, {.max_iter = INT64_MAX}); });
  refused("max_eval is -1", [&] { muster::LBFGS(here.parameters, {.max_eval = -1}); });
  refused("history_size is 0", [&] { muster::LBFGS(here.parameters, {.history_size = 0}); });
  refused("tolerance_grad is nan", [&] { muster::LBFGS(here.parameters, {.tolerance_grad = NAN}); });
  refused("line_search_fn is 2",
          [&] { muster::LBFGS(here.parameters, {.line_search_fn = static_cast<LineSearch>(2)}); });
  refused("have no elements", [&] { muster::LBFGS({at::zeros({0}), at::zeros({2, 0})}); });
  refused("no parameters", [&] { muster::LBFGS(Tensors{}); });
  refused("was given twice", [&] { muster::LBFGS({w, unused, w}); });
  refused("not a tensor of floating-point", [&] { muster::LBFGS({w, at::ones({3}, at::kLong)}); });
  refused("are on cpu and meta", [&] { muster::LBFGS({w, at::ones({3}, at::kMeta)}); });
  refused("one group of parameters, not 2", [&] {
    muster::LBFGS({torch::optim::OptimizerParamGroup({w}), torch::optim::OptimizerParamGroup({unused})});
  });
  refused("options of another class", [&] { muster::LBFGS({muster::Adam::group({w}, {})}); });
  refused("takes no other", [&] { optimizer.add_param_group(torch::optim::OptimizerParamGroup({at::ones({1})})); });
  optimizer.options().max_eval = -3;
  refused("max_eval is -3", [&] { make_steps(optimizer, here, 1); });
  base.add_param_group(torch::optim::OptimizerParamGroup({at::ones({1})}));
  refused("another was added", [&] { make_steps(optimizer, here, 1); });
  // The options of a group count.
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(here.parameters, std::make_unique<muster::LBFGS::OptionsOfGroup>(LBFGSOptions{.max_iter = 8}));
  EXPECT_EQ(muster::LBFGS(groups, {.max_iter = 4}).options().max_eval, 10);
}

// --- ranks ---

struct Net : torch::nn::Module {
  torch::nn::Linear a = register_module("a", torch::nn::Linear(3, 8)),
                    b = register_module("b", torch::nn::Linear(8, 2));
  Net() {
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (const Tensor& each : parameters()) Tensor(each).copy_(numbers(-0.8, 1, each.sizes(), at::kDouble));
  }
  Tensor forward(const Tensor& x) { return b(at::tanh(a(x))); }
};

// Ranks with parts of the batch have the parameters of one process with all of it.
TEST_F(Lbfgs, RanksEqualOneProcess) {
  const Tensor x = at::sin(numbers(0, 70, {32, 3}, at::kDouble));
  const Tensor y = at::cos(at::matmul(x, numbers(-1, 1, {3, 2}, at::kDouble)) * 2);
  for (const auto search : {LineSearch::kNone, kWolfe}) {
    const LBFGSOptions options{.lr = 0.3, .max_iter = 5, .line_search_fn = search};
    Net alone;
    muster::LBFGS whole(alone.parameters(), options);
    const Problem all{alone.parameters(), [&] { return at::mse_loss(alone.forward(x), y); }};
    const double first = all.loss().item<double>();
    make_steps(whole, all, 6);
    EXPECT_LT(all.loss().item<double>(), first / 2);
    run_threads(2, [&](World& world) {
      const Tensor part_x = x.slice(0, world.rank() * 16, world.rank() * 16 + 16);
      const Tensor part_y = y.slice(0, world.rank() * 16, world.rank() * 16 + 16);
      const auto net = std::make_shared<Net>();
      DistributedDataParallel ddp(net);
      muster::LBFGS optimizer(net->parameters(), options);
      for (int step = 0; step < 6; ++step)
        optimizer.step([&] {
          optimizer.zero_grad();
          Tensor loss = at::mse_loss(ddp.forward(part_x), part_y);
          loss.backward();
          loss = loss.detach();
          all_reduce(loss, {.op = ReduceOp::AVG});
          return loss;
        });
      EXPECT_LE(farthest_of(net->parameters(), alone.parameters()), 1e-10);
      EXPECT_EQ(calls_of(optimizer), calls_of(whole));
      for (const Tensor& each : net->parameters()) {
        Tensor of_rank_0 = each.detach().clone();
        broadcast(of_rank_0);
        EXPECT_TRUE(at::equal(of_rank_0, each));
      }
    });
  }
}

}  // namespace
}  // namespace muster::test::lbfgs
