// Averages of a model's parameters over its steps, and new statistics for batch norms.
#include "muster/parallel/averaged_model.h"

#include <gtest/gtest.h>
#include <torch/nn.h>
#include <torch/utils.h>

#include <memory>
#include <string>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/parallel/sync_batch_norm.h"
#include "support/archived.h"
#include "support/ask_python.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

struct Net : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(3, 4)), b = register_module("b", nn::Linear(4, 2));
  nn::BatchNorm1d norm = register_module("norm", nn::BatchNorm1d(4));
  Tensor half = register_parameter("half", at::ones({5}, at::kBFloat16));
  Tensor count = register_buffer("count", at::zeros({1}, at::kLong));
  Tensor forward(const Tensor& x) { return b(norm(a(x))); }
};

void set_all(nn::Module& net, double value) {
  const at::NoGradGuard no_grad;
  for (Tensor& parameter : net.parameters()) parameter.fill_(value);
  for (Tensor& buffer : net.buffers()) buffer.fill_(value);
}
double value_of(const nn::Module& net, const std::string& name) {
  const auto parameters = net.named_parameters();
  const Tensor* const parameter = parameters.find(name);
  return (parameter ? *parameter : net.named_buffers()[name]).flatten()[0].to(at::kDouble).item<double>();
}

TEST(AveragedModel, AveragesEquallyOrExponentially) {
  const auto net = std::make_shared<Net>();
  AveragedModel swa(net), ema(net, {.decay = 0.75}), all(net, {.average_buffers = true, .in_float = true});
  for (const double value : {1, 2, 6}) {
    set_all(*net, value);
    for (auto* const one : {&swa, &ema, &all}) one->update();
  }
  const auto average = [](const AveragedModel& of, const char* name) {
    return of.average(name).flatten()[0].to(at::kDouble).item<double>();
  };
  EXPECT_NEAR(average(swa, "a.weight"), 3, 1e-6);
  EXPECT_NEAR(average(ema, "b.bias"), 0.75 * (0.75 * 1 + 0.25 * 2) + 0.25 * 6, 1e-6);
  EXPECT_EQ(average(swa, "norm.running_mean"), 6);  // the last one
  EXPECT_NEAR(average(all, "norm.running_mean"), 3, 1e-6);
  EXPECT_EQ(average(all, "count"), 6);
  EXPECT_EQ(swa.average("half").scalar_type(), at::kBFloat16);
  EXPECT_EQ(all.average("half").scalar_type(), at::kFloat);
  EXPECT_NEAR(average(all, "half"), 3, 1e-6);
  EXPECT_EQ(swa.updates(), 3);
}

TEST(AveragedModel, EqualPython) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch";
  struct Case {
    std::string python;
    at::ScalarType dtype;
    AveragedModelOptions options;
    double apart;
  };
  const std::vector<Case> cases = {
      {"double|get_swa_avg_fn()|False", at::kDouble, {}, 1e-12},
      {"double|get_swa_avg_fn()|True", at::kDouble, {.average_buffers = true}, 1e-12},
      {"double|get_ema_avg_fn(0.9)|True", at::kDouble, {.decay = 0.9, .average_buffers = true}, 1e-12},
      {"double|get_ema_avg_fn(0.999)|False", at::kDouble, {.decay = 0.999}, 1e-12},
      {"float|get_ema_avg_fn(0.9)|False", at::kFloat, {.decay = 0.9}, 1e-6}};
  std::vector<std::string> lines;
  for (const Case& one : cases) lines.push_back(one.python);
  const auto theirs = ask_python("unit/averaged_model_reference.py", lines);
  ASSERT_EQ(theirs.size(), cases.size());
  for (size_t i = 0; i < cases.size(); ++i) {
    nn::BatchNorm1d net(5);
    net->to(cases[i].dtype);
    AveragedModel averaged(net, cases[i].options);
    for (int step = 0; step < 50; ++step) {
      const at::NoGradGuard no_grad;
      const Tensor at = at::arange(5, at::kDouble) * 1.3 + step;
      net->weight.copy_(at.sin());
      net->bias.copy_(at.cos());
      net->running_mean.copy_((at * 2).sin());
      averaged.update();
    }
    const Tensor values =
        at::cat({averaged.average("weight"), averaged.average("bias"), averaged.average("running_mean")})
            .detach()
            .to(at::kDouble);
    const std::vector<double> ours(values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel());
    EXPECT_LE(farthest(ours, theirs[i]), cases[i].apart) << cases[i].python;
  }
}

TEST(AveragedModel, AreInUseForATime) {
  const auto net = std::make_shared<Net>();
  AveragedModel swa(net);
  EXPECT_THROW(swa.in_use(), InvalidArgument);
  for (const double value : {1, 2}) {
    set_all(*net, value);
    swa.update();
  }
  set_all(*net, 7);
  const Tensor weight = net->a->weight;
  {
    const auto averaged = swa.in_use();
    EXPECT_NEAR(value_of(*net, "a.weight"), 1.5, 1e-6);
    EXPECT_EQ(value_of(*net, "norm.running_mean"), 2);
    EXPECT_EQ(value_of(*net, "count"), 2);
    EXPECT_TRUE(weight.is_same(net->a->weight));
    EXPECT_THROW(swa.update(), InvalidArgument);
    EXPECT_THROW(swa.in_use(), InvalidArgument);
    EXPECT_THROW(saved(swa), InvalidArgument);
  }
  EXPECT_EQ(value_of(*net, "a.weight"), 7);
  EXPECT_EQ(value_of(*net, "count"), 7);
  swa.update();
  EXPECT_NEAR(swa.average("a.weight")[0][0].item<double>(), (1 + 2 + 7) / 3.0, 1e-6);
  swa.copy_to_module();
  EXPECT_NEAR(value_of(*net, "a.weight"), 10 / 3.0, 1e-6);
}

TEST(AveragedModel, KeepTheirDigitsWhileInUse) {
  const auto net = std::make_shared<Net>();
  AveragedModel all(net, {.in_float = true});
  for (const double value : {1.0, 1.0078125, 1.0}) {
    set_all(*net, value);
    all.update();
  }
  const Tensor before = all.average("half").clone();
  {
    const auto averaged = all.in_use();
    EXPECT_THROW(all.copy_to_module(), InvalidArgument);
  }
  EXPECT_TRUE(at::equal(all.average("half"), before));
  EXPECT_NE(before[0].item<float>(), before.to(at::kBFloat16)[0].item<float>());
  EXPECT_EQ(value_of(*net, "half"), 1);
  AveragedModel none(net);
  EXPECT_THROW(none.copy_to_module(), InvalidArgument);
}

// As it is with create_graph: a graph over the parameters notices the exchange.
TEST(AveragedModel, GraphsNoticeTheExchange) {
  const auto net = std::make_shared<Net>();
  AveragedModel swa(net);
  swa.update();
  const Tensor loss = net->forward(torch::randn({4, 3})).sum();
  { const auto averaged = swa.in_use(); }
  EXPECT_THROW(loss.backward(), c10::Error);
}

TEST(AveragedModel, Resumes) {
  const auto net = std::make_shared<Net>(), other = std::make_shared<Net>();
  AveragedModel first(net, {.decay = 0.9}), second(other, {.decay = 0.9});
  for (const double value : {1, 2}) {
    set_all(*net, value);
    first.update();
  }
  load(second, saved(first));
  set_all(*net, 5);
  set_all(*other, 5);
  first.update();
  second.update();
  EXPECT_TRUE(at::equal(first.average("a.weight"), second.average("a.weight")));
  EXPECT_EQ(second.updates(), 3);
  AveragedModel another(nn::Linear(2, 2));
  EXPECT_THROW(load(another, saved(first)), InvalidArgument);
  torch::serialize::OutputArchive empty;
  EXPECT_THROW(load(another, bytes_of(empty)), CorruptError);
}

TEST(AveragedModel, BadUseIsRefused) {
  const auto net = std::make_shared<Net>();
  EXPECT_THROW(AveragedModel(net, {.decay = 1.5}), InvalidArgument);
  AveragedModel swa(net);
  EXPECT_THROW(swa.average("a.wieght"), InvalidArgument);
  net->a = net->replace_module("a", nn::Linear(3, 4));
  EXPECT_CONTAINS(message_of<InvalidArgument>([&] { swa.update(); }), "parameter a.weight is another tensor");
}

TEST(AveragedModel, UpdateBnMakesTheStatisticsOfAllBatches) {
  run_threads(2, [](World& world) {
    nn::Sequential net(nn::BatchNorm1d(nn::BatchNormOptions(3).momentum(0.4)), SyncBatchNorm(3));
    const Tensor x = torch::sin(torch::arange(24.0F).view({8, 3})) * 2 + 1;
    net->eval();
    const auto norm = std::dynamic_pointer_cast<nn::BatchNorm1dImpl>(net->ptr(0));
    norm->running_mean.fill_(100);
    norm->num_batches_tracked.fill_(9);
    const Tensor mine = x.slice(0, world.rank() * 4, world.rank() * 4 + 4);
    update_bn(*net,
              [&] {
                for (const Tensor& batch : mine.split(2)) net->forward(batch);
              },
              {.group = world.group()});
    EXPECT_FALSE(net->is_training());
    EXPECT_EQ(norm->options.momentum(), 0.4);
    EXPECT_TRUE(at::allclose(norm->running_mean, x.mean(0), 1e-5, 1e-6));
    Tensor variance = at::zeros({3});
    for (const Tensor& batch : x.split(2)) variance += batch.var(0) / 4;
    EXPECT_TRUE(at::allclose(norm->running_var, variance, 1e-5, 1e-6));
    EXPECT_EQ(norm->num_batches_tracked.item<int64_t>(), 2);
    EXPECT_THROW(update_bn(*net, [] { throw std::runtime_error("no data"); }), std::runtime_error);
    EXPECT_EQ(norm->options.momentum(), 0.4);
    EXPECT_FALSE(net->is_training());
  });
}

}  // namespace
}  // namespace muster::test
