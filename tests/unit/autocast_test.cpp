// Autocast: the operators of a transformer's layer have the dtypes that Python gives them, and its results; weights are
// converted once; threads and ranks of DistributedDataParallel do not disturb each other.
#include "muster/optim/autocast.h"

#include <gtest/gtest.h>
#include <torch/nn/modules/transformerlayer.h>

#include <barrier>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "base/text.h"
#include "multiprocess/fsdp_support.h"
#include "muster/checkpoint/safetensors.h"
#include "support/ask_python.h"
#include "support/operator_record.h"
#include "support/temporary_folder.h"

namespace muster::test::autocasts {
namespace {

using Operators = std::vector<OperatorRecord::Operator>;
using Tensors = std::map<std::string, Tensor>;

const std::string kConversion = "aten::_to_copy";

std::string name_of(at::ScalarType dtype) { return dtype == torch::kHalf ? "float16" : "bfloat16"; }

// libtorch's attention averages its weights, which nobody uses, with other operators than Python's.
Operators without_averages(const Operators& all) {
  Operators rest;
  for (const auto& one : all)
    if (one.name != "aten::sum" && one.name != "aten::div" && one.name != "aten::mean") rest.push_back(one);
  return rest;
}

Operators operators_in(const std::filesystem::path& path) {
  Operators all;
  std::ifstream file(path);
  for (std::string name, dtype; file >> name >> dtype;) all.push_back({name, dtype});
  return all;
}

// What Python's layer computes: torch::linear, and attention as one operator. nn::Linear and nn::MultiheadAttention of
// libtorch compute the same with others.
Tensor forward_of_python(nn::TransformerEncoderLayer& layer, const Tensor& x) {
  const int64_t length = x.size(0), batch = x.size(1), width = x.size(2);
  const auto& attention = layer->self_attn;
  const int64_t heads = attention->options.num_heads();
  const Tensor projected = torch::linear(x, attention->in_proj_weight, attention->in_proj_bias)
                               .unflatten(-1, {3, width})
                               .unsqueeze(0)
                               .transpose(0, -2)
                               .squeeze(-2)
                               .contiguous();
  const auto head = [&](int64_t i) {
    return projected[i]
        .view({length, batch * heads, width / heads})
        .transpose(0, 1)
        .view({batch, heads, length, width / heads});
  };
  const Tensor attended = at::scaled_dot_product_attention(head(0), head(1), head(2))
                              .permute({2, 0, 1, 3})
                              .contiguous()
                              .view({batch * length, width});
  const Tensor out = torch::linear(attended, attention->out_proj->weight, attention->out_proj->bias);
  const Tensor y = layer->norm1(x + out.view({length, batch, width}));
  const Tensor wide = torch::relu(torch::linear(y, layer->linear1->weight, layer->linear1->bias));
  return layer->norm2(y + torch::linear(wide, layer->linear2->weight, layer->linear2->bias));
}

struct Question {
  bool train = false;
  at::ScalarType dtype = torch::kBFloat16;
  bool libtorch = false;  // with libtorch's nn::Linear and nn::MultiheadAttention
};

// The same weights and the same input on both sides.
void compare_with_python(const std::vector<Question>& questions) {
  at::set_num_threads(1);
  const TemporaryFolder folder;
  torch::manual_seed(3);
  nn::TransformerEncoderLayer layer(nn::TransformerEncoderLayerOptions(16, 4).dim_feedforward(48).dropout(0));
  Tensors state{{"x", torch::randn({5, 3, 16})}};
  {
    const torch::NoGradGuard no_grad;
    for (const auto& item : layer->named_parameters()) {
      if (item.value().dim() == 1) item.value().add_(torch::randn_like(item.value()), 0.1);  // no bias of 0
      state[item.key()] = item.value();
    }
  }
  save_safetensors(folder / "weights", state);
  std::vector<std::string> lines;
  std::vector<Operators> operators;
  std::vector<Tensors> results;
  for (const Question& question : questions) {
    const std::string number = std::to_string(lines.size());
    lines.push_back(text(question.train ? "train" : "eval", "|", name_of(question.dtype), "|",
                         question.libtorch ? "libtorch" : "python", "|", (folder / "weights").string(), "|",
                         (folder / ("results" + number)).string(), "|", (folder / ("operators" + number)).string()));
    const Tensor x = state["x"].clone().requires_grad_();
    layer->train(question.train);
    layer->zero_grad();
    Tensor y;
    {
      const OperatorRecord record;
      const Autocast autocast(question.dtype);
      y = question.libtorch ? layer(x) : forward_of_python(layer, x);
      operators.push_back(record.operators());
    }
    Tensors& found = results.emplace_back(Tensors{{"y", y.detach()}});
    if (!question.train) continue;
    y.square().sum().backward();
    found["x"] = x.grad();
    for (const auto& item : layer->named_parameters()) found[item.key()] = item.value().grad().clone();
  }
  ASSERT_EQ(ask_python("unit/autocast_reference.py", lines).size(), lines.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    SCOPED_TRACE(lines[i]);
    const Operators theirs = operators_in(folder / ("operators" + std::to_string(i)));
    EXPECT_GT(theirs.size(), 15u);
    EXPECT_EQ(without_averages(operators[i]), without_averages(theirs));
    const SafetensorsFile file(folder / ("results" + std::to_string(i)));
    EXPECT_EQ(file.names().size(), results[i].size());
    for (const auto& [name, ours] : results[i]) {
      const Tensor other = file.tensor(name);
      EXPECT_EQ(ours.scalar_type(), other.scalar_type()) << name;
      const double largest = std::max(1.0, other.abs().max().item<double>());
      EXPECT_LE((ours - other).abs().max().item<double>(), 1e-6 * largest) << name;
    }
  }
}

TEST(Autocast, ATransformersOperatorsHaveTheDtypesOfPython) {
  std::vector<Question> questions;
  for (const bool libtorch : {false, true})
    for (const auto dtype : {torch::kBFloat16, torch::kHalf})
      for (const bool train : {false, true}) questions.push_back({train, dtype, libtorch});
  compare_with_python(questions);
}

struct Net : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(6, 8)), b = register_module("b", nn::Linear(8, 4));
  bool casts_inside = false;  // forward() has the guard
  Tensor forward(const Tensor& x) {
    const Autocast autocast(torch::kBFloat16, torch::kCPU,
                            casts_inside || at::autocast::is_autocast_enabled(torch::kCPU));
    return b(torch::relu(a(x)));
  }
};

// The weight and the bias of a convolution and of a linear layer, and the input of each forward().
TEST(Autocast, ConvertsAWeightOnceUntilTheOutermostGuardEnds) {
  nn::Conv1d conv(nn::Conv1dOptions(3, 4, 2));
  nn::Linear linear(6, 8);
  const Tensor x = torch::ones({2, 3, 7});
  const auto conversions = [&] {
    const OperatorRecord record;
    torch::linear(torch::relu(conv(x)), linear->weight, linear->bias);
    return record.count(kConversion);
  };
  EXPECT_EQ(conversions(), 0u);
  {
    const Autocast outer;
    EXPECT_EQ(conversions(), 5u);
    EXPECT_EQ(conversions(), 1u);
    {
      const Autocast inner;
      EXPECT_EQ(conversions(), 1u);
    }
    EXPECT_EQ(conversions(), 1u);
  }
  {
    const Autocast again;  // the weights may have changed
    EXPECT_EQ(conversions(), 5u);
  }
  {
    const Autocast outer;
    EXPECT_EQ(conversions(), 5u);
    {
      const Autocast other(torch::kHalf);
      EXPECT_EQ(conversions(), 5u);
      EXPECT_EQ(conversions(), 1u);
    }
    EXPECT_EQ(conversions(), 5u);
  }
}

// It gives the product a view, the transposed weight, and libtorch keeps no copy of a view.
TEST(Autocast, LibtorchsLinearConvertsItsWeightEachTime) {
  nn::Linear linear(6, 8);
  const Tensor x = torch::ones({2, 3, 6});
  const Autocast autocast;
  for (int time = 0; time < 2; ++time) {
    const OperatorRecord record;
    linear(x);
    EXPECT_EQ(record.count(kConversion), 2u);
  }
}

// The cache is the process's: threads with their own modules fill it, and empty it, at the same time.
// So many threads call fn(their number) 200 times at the same time. By thread, how often it was false.
std::vector<int> failures_of_threads(size_t count, const std::function<bool(size_t)>& fn) {
  std::barrier all_there(static_cast<std::ptrdiff_t>(count));
  std::vector<int> failures(count, 0);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < count; ++i)
    threads.emplace_back([&, i] {
      all_there.arrive_and_wait();
      for (int time = 0; time < 200; ++time)
        if (!fn(i)) ++failures[i];
      if (at::autocast::is_autocast_enabled(torch::kCPU)) ++failures[i];
    });
  for (std::thread& thread : threads) thread.join();
  return failures;
}

// Threads with convolutions of their own in different dtypes, beside threads that share one: the cache of converted
// weights is the process's, and each thread whose outermost guard ends empties it.
TEST(Autocast, ThreadsShareTheCacheOfWeights) {
  const Tensor x = torch::linspace(-1, 1, 3 * 16).view({1, 3, 16});
  const std::vector<at::ScalarType> dtypes{torch::kBFloat16, torch::kBFloat16, torch::kBFloat16, torch::kHalf};
  const nn::Conv1d shared(nn::Conv1dOptions(3, 4, 2)), own(nn::Conv1dOptions(3, 4, 2)),
      other(nn::Conv1dOptions(3, 4, 2));
  std::vector<nn::Conv1d> modules{shared, shared, own, other};
  std::vector<Tensor> expected;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    const Autocast alone(dtypes[i]);
    expected.push_back(modules[i](x).detach());
  }
  const auto wrong = failures_of_threads(dtypes.size(), [&](size_t i) {
    const Autocast autocast(dtypes[i]);
    const Tensor first = modules[i](x), second = modules[i](x);
    return first.scalar_type() == dtypes[i] && at::equal(first, expected[i]) && at::equal(second, expected[i]);
  });
  EXPECT_EQ(wrong, std::vector<int>(dtypes.size(), 0));
}

TEST(Autocast, ThreadsHaveTheirOwnDtypes) {
  const std::vector<at::ScalarType> dtypes{torch::kBFloat16, torch::kHalf, torch::kBFloat16};
  std::vector<nn::Linear> modules;
  std::vector<Tensor> expected;
  const Tensor x = torch::linspace(-1, 1, 2 * 16).view({2, 16});
  for (const at::ScalarType dtype : dtypes) {
    modules.emplace_back(16, 16);
    const Autocast alone(dtype);
    expected.push_back(modules.back()(x).detach());
    EXPECT_EQ(expected.back().scalar_type(), dtype);
  }
  const auto wrong = failures_of_threads(dtypes.size(), [&](size_t i) {
    const Autocast autocast(dtypes[i]);
    const Tensor first = modules[i](x), second = modules[i](x);
    return first.scalar_type() == dtypes[i] && at::equal(first, expected[i]) && second.scalar_type() == dtypes[i] &&
           at::equal(second, expected[i]);
  });
  EXPECT_EQ(wrong, std::vector<int>(dtypes.size(), 0));
}

// One process takes the parts of both ranks; halves of sums are exact, so the results are equal. The guard stands in
// forward(), or around it.
TEST(Autocast, InDdpEqualsOneProcess) {
  constexpr int kSteps = 3;
  const auto part = [](int rank, int step) {
    return torch::sin(torch::arange(4 * 6, torch::kFloat).view({4, 6}) + 10 * rank + 3 * step);
  };
  for (const bool inside : {false, true}) {
    const auto begin = [inside] {
      auto net = std::make_shared<Net>();
      net->casts_inside = inside;
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters())
        parameter.copy_(torch::cos(torch::arange(parameter.numel(), torch::kFloat)).view_as(parameter));
      return net;
    };
    const auto loss_of = [inside](auto& model, const Tensor& x) {
      Tensor y;
      {
        const Autocast autocast(torch::kBFloat16, torch::kCPU, !inside);
        y = model.forward(x);
      }
      EXPECT_EQ(y.scalar_type(), torch::kBFloat16);
      return y.to(torch::kFloat).square().mean();
    };
    const auto alone = begin();
    torch::optim::SGD sgd(alone->parameters(), 0.1);
    for (int step = 0; step < kSteps; ++step) {
      sgd.zero_grad();
      for (const int rank : {0, 1}) (loss_of(*alone, part(rank, step)) / 2).backward();
      sgd.step();
    }
    EXPECT_FALSE(at::equal(alone->a->weight, begin()->a->weight));
    on_ranks(2, [&](World& world) {
      const auto net = begin();
      DistributedDataParallel ddp(net);
      torch::optim::SGD own(net->parameters(), 0.1);
      for (int step = 0; step < kSteps; ++step) {
        own.zero_grad();
        loss_of(ddp, part(world.rank(), step)).backward();
        own.step();
      }
      for (const auto& item : alone->named_parameters()) {
        const Tensor apart = net->named_parameters()[item.key()] - item.value();
        EXPECT_LE(apart.abs().max().item<double>(), 1e-6) << item.key() << ", inside: " << inside;
      }
    });
  }
}

}  // namespace
}  // namespace muster::test::autocasts
