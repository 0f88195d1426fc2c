// Sums in .grad have the bits of the order of the paths, in whatever order the parts come, and mean the same as
// libtorch's own sums if others change .grad meanwhile.
#include "autograd/graph/ordered_sums.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace muster::test {
namespace {

using at::Tensor;
using autograd::OrderedSums;
using autograd::Path;
using torch::autograd::AccumulateGrad;

class OrderedSumsTest : public testing::Test {
 protected:
  void add(const Path& path, const Tensor& gradient, size_t position = 0) {
    sums_.add(path, position, node(), gradient.clone());
  }
  AccumulateGrad& node() const { return dynamic_cast<AccumulateGrad&>(*node_); }
  Tensor grad() const { return leaf_.grad(); }
  static Tensor part(uint32_t i) { return at::full({5}, 0.1 * (i + 1) * (i % 2 == 0 ? 1 : -1e3), at::kDouble) + 1e-7; }
  // before + part 0 + part 1 + ...
  static Tensor in_order(const std::vector<uint32_t>& parts, Tensor sum = {}) {
    for (const uint32_t i : parts) sum = sum.defined() ? sum + part(i) : part(i);
    return sum;
  }
  void expect_grad(const Tensor& expected) const {
    ASSERT_TRUE(grad().defined());
    EXPECT_TRUE(grad().equal(expected)) << grad() << expected;
  }

  Tensor leaf_ = at::zeros({5}, at::kDouble).set_requires_grad(true);
  decltype(torch::autograd::impl::grad_accumulator(leaf_)) node_ = torch::autograd::impl::grad_accumulator(leaf_);
  OrderedSums sums_;
};

TEST_F(OrderedSumsTest, EachOrderOfArrivalGivesTheBitsOfTheOrderOfThePaths) {
  std::vector<uint32_t> order{0, 1, 2, 3, 4};
  const Tensor expected = in_order(order);
  bool others_differ = false;
  do {
    leaf_.mutable_grad() = Tensor();
    Tensor as_they_come;
    for (const uint32_t i : order) {
      add({i / 2, i}, part(i));
      as_they_come = as_they_come.defined() ? as_they_come + part(i) : part(i);
    }
    expect_grad(expected);
    others_differ |= !as_they_come.equal(expected);
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_TRUE(others_differ);  // so the order of arrival would have been seen
}

TEST_F(OrderedSumsTest, EachPartIsInTheSumAsSoonAsItHasCome) {
  add({2}, part(2));
  expect_grad(part(2));
  const Tensor held = grad();
  add({0}, part(0));
  expect_grad(in_order({0, 2}));
  add({1}, part(1));
  expect_grad(in_order({0, 1, 2}));
  EXPECT_TRUE(grad().is_same(held));  // as libtorch: into the same tensor
  add({1}, part(3), 1);               // another leaf of this call's graph that is the same tensor
  expect_grad(in_order({0, 1, 3, 2}));
  add({0}, part(4));  // the call's graph, once more
  expect_grad(part(0) + part(4) + part(1) + part(3) + part(2));
}

TEST_F(OrderedSumsTest, TheSamePlaceTwiceIsOnePart) {
  add({1}, part(1));
  add({1}, part(2));
  expect_grad(part(1) + part(2));
  add({0}, part(0));
  expect_grad(part(0) + (part(1) + part(2)));
}

TEST_F(OrderedSumsTest, WhatOthersDoToGradIsWhereTheNextSumBegins) {
  add({1}, part(1));
  add({0}, part(0));
  leaf_.mutable_grad() = Tensor();  // zero_grad()
  add({1}, part(3));
  expect_grad(part(3));
  leaf_.mutable_grad().zero_();  // zero_grad(false)
  add({1}, part(2));
  expect_grad(at::zeros({5}, at::kDouble) + part(2));
  leaf_.mutable_grad().mul_(0.3);  // clipped
  add({1}, part(4));
  add({0}, part(3));
  expect_grad(in_order({3, 4}, (at::zeros({5}, at::kDouble) + part(2)) * 0.3));
  leaf_.mutable_grad() = part(7);  // a tensor of the program's
  add({1}, part(1));
  add({0}, part(0));
  expect_grad(in_order({0, 1}, part(7)));
  node()({part(8)});  // a backward of this process
  const Tensor local = grad().clone();
  add({1}, part(1));
  add({0}, part(0));
  expect_grad(in_order({0, 1}, local));
}

// As those of a.view({5}) + b.
TEST_F(OrderedSumsTest, GradsOfOneGraphShareNoMemory) {
  Tensor other = at::zeros({1, 5}, at::kDouble).set_requires_grad(true);
  const auto other_node = torch::autograd::impl::grad_accumulator(other);
  Tensor whole = part(1), view = whole.view({1, 5});
  sums_.add({0}, 0, dynamic_cast<AccumulateGrad&>(*other_node), std::move(view));
  sums_.add({0}, 1, node(), std::move(whole));
  other.mutable_grad().zero_();
  expect_grad(part(1));
  add({1}, part(2));
  expect_grad(part(1) + part(2));
  EXPECT_EQ(other.grad().abs().max().item<double>(), 0);
}

TEST_F(OrderedSumsTest, SparsePartsAndDenseOnes) {
  const auto sparse = [](uint32_t i) { return part(i).to_sparse(); };
  add({2}, sparse(2));
  EXPECT_TRUE(grad().is_sparse());
  add({0}, sparse(0));
  EXPECT_TRUE(grad().is_sparse());
  EXPECT_TRUE(at::allclose(grad().to_dense(), in_order({0, 2})));
  add({1}, part(1));
  EXPECT_FALSE(grad().is_sparse());
  EXPECT_TRUE(at::allclose(grad(), in_order({0, 1, 2})));
}

TEST_F(OrderedSumsTest, TheHookThatWaitsForGradRunsAfterEachPart) {
  struct Step final : torch::autograd::PostAccumulateGradHook {
    explicit Step(std::vector<Tensor>& seen) : seen(seen) {}
    void operator()(const Tensor& leaf) override {
      seen.push_back(leaf.grad().clone());
      leaf.mutable_grad() = Tensor();
    }
    std::vector<Tensor>& seen;
  };
  std::vector<Tensor> seen;
  torch::autograd::impl::set_post_acc_grad_hooks(leaf_, std::make_unique<Step>(seen));
  add({1}, part(1));
  add({0}, part(0));
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(seen[0].equal(part(1)));
  EXPECT_TRUE(seen[1].equal(part(0)));  // the hook has taken what was there
  EXPECT_FALSE(grad().defined());
}

TEST_F(OrderedSumsTest, HooksOfTheNodeNeedTheNode) {
  struct Nothing final : torch::autograd::FunctionPostHook {
    autograd::variable_list operator()(const autograd::variable_list& outputs,
                                       const autograd::variable_list&) override {
      return outputs;
    }
  };
  EXPECT_TRUE(OrderedSums::can_add_to(node()));
  node().add_post_hook(std::make_unique<Nothing>());
  EXPECT_FALSE(OrderedSums::can_add_to(node()));
}

TEST_F(OrderedSumsTest, ALeafThatNeedsNoGradientAnyMoreGetsNone) {
  leaf_.set_requires_grad(false);
  add({1}, part(1));
  EXPECT_FALSE(grad().defined());
}

TEST_F(OrderedSumsTest, ManyThreadsGiveTheSameBits) {
  const std::vector<uint32_t> all{0, 1, 2, 3, 4, 5, 6, 7};
  const Tensor expected = in_order(all);
  for (int round = 0; round < 20; ++round) {
    leaf_.mutable_grad() = Tensor();
    std::vector<std::thread> threads;
    for (const uint32_t i : all) threads.emplace_back([this, i] { add({i}, part(i)); });
    for (auto& thread : threads) thread.join();
    expect_grad(expected);
  }
}

TEST_F(OrderedSumsTest, ALeafThatIsGoneIsForgotten) {
  add({1}, part(1));
  add({0}, part(0));
  c10::weak_intrusive_ptr<c10::StorageImpl> kept{c10::intrusive_ptr<c10::StorageImpl>()};
  {
    Tensor other = at::zeros({5}, at::kDouble).set_requires_grad(true);
    const auto other_node = torch::autograd::impl::grad_accumulator(other);
    const Tensor first = part(1), second = part(2);
    kept = second.storage().getWeakStorageImpl();
    sums_.add({0}, 0, dynamic_cast<AccumulateGrad&>(*other_node), first);
    sums_.add({1}, 0, dynamic_cast<AccumulateGrad&>(*other_node), second);
  }
  EXPECT_FALSE(kept.expired());  // a part
  std::vector<Tensor> leaves;
  for (int i = 0; i < 200 && !kept.expired(); ++i) {
    leaves.push_back(at::zeros({5}, at::kDouble).set_requires_grad(true));
    const auto its_node = torch::autograd::impl::grad_accumulator(leaves.back());
    sums_.add({0}, 0, dynamic_cast<AccumulateGrad&>(*its_node), part(1));
  }
  EXPECT_TRUE(kept.expired());
}

}  // namespace
}  // namespace muster::test
