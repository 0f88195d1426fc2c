// States of muster::LBFGS, which go on to the bit.
#include <torch/serialize.h>

#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/checkpoint/snapshot.h"
#include "muster/comm/world.h"
#include "muster/optim/optimizers.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "unit/lbfgs_fixture.h"

namespace muster::test::lbfgs {
namespace {

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
  refused("param_groups.0.max_iter", at::scalar_tensor(0), "max_iter: expected 1 to 2^50, got 0");
  for (const double not_whole : {2.5, double{NAN}, 1e300})
    refused("param_groups.0.max_iter", at::scalar_tensor(not_whole, at::kDouble), "expected a whole number, got");
  refused("param_groups.0.lr", at::zeros({1}), "'param_groups.0.lr' is not a tensor without dimensions");
  refused("state.0.d", at::zeros({12}, at::kDouble),
          "prev_flat_grad in the state of LBFGS: expected shape [12], got [11]");
  refused("state.0.d", Tensor(), "has no d");
  refused("state.0.old_dirs", at::zeros({pairs, 7}), "old_dirs in the state of LBFGS: expected shape");
  refused("state.0.ro", at::ones({pairs + 1}), "old_dirs in the state of LBFGS: expected shape");
  refused("state.0.n_iter", at::scalar_tensor(-1, at::kLong),
          "n_iter in the state of LBFGS: expected 0 or more, got -1");
  refused("state.0.n_iter", at::scalar_tensor(0, at::kLong), "after 0 directions has no 'H_diag'");
  // Of other parameters, as a dictionary and as an archive.
  const Problem other = problem("valley", at::kDouble);
  muster::LBFGS theirs(other.parameters, {.lr = 0.3});
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { theirs.load_state_dict(good); }),
                  "expected 6 numbers, as its parameters have, got 11");
  std::stringstream bytes;
  torch::save(optimizer, bytes);
  muster::LBFGS two({at::ones({3}).requires_grad_(), at::ones({4}).requires_grad_()}, {.lr = 0.3});
  std::stringstream again(bytes.str());
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { torch::load(two, again); }), "as its parameters have, got 11");
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

}  // namespace
}  // namespace muster::test::lbfgs
