// muster::LBFGS: the parameters of Python's, steps, and ranks that equal one process. States: lbfgs_state_test.cpp.
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/schedulers/step_lr.h>

#include <cmath>
#include <map>
#include <memory>
#include <stdexcept>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/checkpoint/safetensors.h"
#include "muster/comm/collectives.h"
#include "muster/comm/world.h"
#include "muster/optim/functional_optimizer.h"
#include "muster/optim/optimizers.h"
#include "muster/parallel/ddp.h"
#include "support/ask_python.h"
#include "support/full_run.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "unit/lbfgs_fixture.h"

namespace muster::test::lbfgs {
namespace {

// One run of Python answers all, because it needs seconds to begin.
//   - Steps of all cases, here and there: 10 in the gate, 100 in the full run.
//   - Five steps here, five in Python, and five here.
TEST_F(Lbfgs, EqualsPythonAlsoFromItsState) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch";
  const auto tolerance = [](at::ScalarType dtype) { return dtype == at::kDouble ? 1e-12 : 1e-6; };
  const int steps = full_run() ? 100 : 10;
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
  refused("expected one real number, got no tensor", [&] { optimizer.step([] { return Tensor(); }); });
  refused("a tensor of shape [7]", [&] { optimizer.step([&] { return w; }); });
  refused("lr: expected a finite number of 0 or more, got -1", [&] { muster::LBFGS(here.parameters, {.lr = -1}); });
  refused("max_iter: expected 1 to 2^50, got 0", [&] { muster::LBFGS(here.parameters, {.max_iter = 0}); });
  refused("max_iter: expected 1 to 2^50, got 9.22337e+18",
          [&] { muster::LBFGS(here.parameters, {.max_iter = INT64_MAX}); });
  refused("max_eval: expected 1 to 2^50, got -1", [&] { muster::LBFGS(here.parameters, {.max_eval = -1}); });
  refused("history_size: expected 1 to 2^50, got 0", [&] { muster::LBFGS(here.parameters, {.history_size = 0}); });
  refused("tolerance_grad: expected a finite number, got nan",
          [&] { muster::LBFGS(here.parameters, {.tolerance_grad = NAN}); });
  refused("line_search_fn: expected LineSearch::kNone or kStrongWolfe, got 2",
          [&] { muster::LBFGS(here.parameters, {.line_search_fn = static_cast<LineSearch>(2)}); });
  refused("have no elements", [&] { muster::LBFGS({at::zeros({0}), at::zeros({2, 0})}); });
  refused("no parameters", [&] { muster::LBFGS(Tensors{}); });
  refused("was given twice", [&] { muster::LBFGS({w, unused, w}); });
  refused("not a tensor of floating-point", [&] { muster::LBFGS({w, at::ones({3}, at::kLong)}); });
  refused("are on cpu and meta", [&] { muster::LBFGS({w, at::ones({3}, at::kMeta)}); });
  refused("expected one group of parameters, got 2", [&] {
    muster::LBFGS({torch::optim::OptimizerParamGroup({w}), torch::optim::OptimizerParamGroup({unused})});
  });
  refused("options of another class", [&] { muster::LBFGS({muster::Adam::group({w}, {})}); });
  refused("takes no other", [&] { optimizer.add_param_group(torch::optim::OptimizerParamGroup({at::ones({1})})); });
  optimizer.options().max_eval = -3;
  refused("max_eval: expected 1 to 2^50, got -3", [&] { make_steps(optimizer, here, 1); });
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
