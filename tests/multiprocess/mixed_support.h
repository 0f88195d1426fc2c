// What the tests of mixed precision share.
#pragma once

#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn.h>
#include <torch/optim/adamw.h>

#include <functional>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "multiprocess/fsdp_support.h"

namespace muster::test {

inline const MixedPrecision kBFloat16{.param_dtype = torch::kBFloat16, .output_dtype = torch::kFloat};

// The steps of one process that has parameters, and in each step a copy of the module in fewer bits, which computes the
// gradients of every rank's part.
template <typename Net>
std::shared_ptr<Net> trained_alone(const MixedPrecision& precision, int ranks, int steps, auto loss_of) {
  const auto net = make<Net>(7, {}), copy = make<Net>(7, {});
  for (auto& module : copy->modules()) {
    const auto own = precision.of_module ? precision.of_module(*module) : std::nullopt;
    const auto dtype = own ? own->param_dtype : precision.param_dtype;
    if (dtype && (!precision.full_precision || !precision.full_precision(*module)))
      for (auto& parameter : module->parameters(false)) parameter.set_data(parameter.to(*dtype));
  }
  torch::optim::AdamW optimizer(net->parameters());
  for (int step = 0; step < steps; ++step) {
    const torch::NoGradGuard no_grad;
    const auto here = net->parameters(), low = copy->parameters();
    for (size_t i = 0; i < here.size(); ++i) {
      low[i].copy_(here[i]);
      here[i].mutable_grad() = torch::zeros_like(here[i]);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      copy->zero_grad();
      {
        const at::AutoGradMode with_grad(true);
        loss_of(*copy, rank, step, *precision.param_dtype).backward();
      }
      for (size_t i = 0; i < here.size(); ++i)
        here[i].mutable_grad() += low[i].grad().to(here[i].scalar_type()) / ranks;
    }
    optimizer.step();
  }
  return net;
}

inline bool is_group_norm(const nn::Module& module) { return dynamic_cast<const nn::GroupNormImpl*>(&module); }
inline bool is_norm(const nn::Module& module) {
  return is_group_norm(module) || dynamic_cast<const nn::BatchNorm2dImpl*>(&module) ||
         dynamic_cast<const nn::InstanceNorm2dImpl*>(&module);
}

std::vector<Tensor> parameters_with_gradients(const auto& model) {
  if constexpr (requires { model.owned_parameters(); })
    return model.owned_parameters();
  else
    return model.module()->parameters();
}

// `wrap` makes a FullyShardedDataParallel or DistributedDataParallel of a net.
template <typename Net>
void expect_steps_of_such_a_copy(const HostOfRank& hosts, const MixedPrecision& precision, auto wrap, auto loss_of,
                                 double apart = 0) {
  SCOPED_TRACE(testing::PrintToString(hosts));
  MixedPrecision of_alone = precision;
  of_alone.full_precision = is_norm;
  const auto alone = trained_alone<Net>(of_alone, static_cast<int>(hosts.size()), 3, loss_of);
  on_hosts(hosts, [&](World& world) {
    const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {});
    auto model = wrap(net, precision);
    torch::optim::AdamW optimizer(net->parameters());
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      loss_of(model, world.rank(), step, torch::kFloat).backward();
      for (const auto& parameter : parameters_with_gradients(model)) {
        EXPECT_EQ(parameter.scalar_type(), torch::kFloat);
        EXPECT_EQ(parameter.grad().scalar_type(), torch::kFloat);
      }
      optimizer.step();
    }
    if constexpr (requires { model.gather(); }) model.gather();
    const auto first = make<Net>(7, {})->named_parameters(), expected = alone->named_parameters();
    for (const auto& item : net->named_parameters()) {
      const Tensor moved = item.value() - first[item.key()], should = expected[item.key()] - first[item.key()];
      EXPECT_LE((moved - should).norm().template item<double>(), (apart + 1e-4) * should.norm().template item<double>())
          << item.key();
    }
    if constexpr (requires { model.synchronize(); }) model.synchronize();
  });
}

inline const auto kLossOfFsdpNet = [](auto& net, int rank, int step, at::ScalarType dtype) {
  return net.forward(fsdp_input(rank, step).to(dtype)).to(torch::kFloat).square().sum();
};

struct SmallLstm : nn::Module {
  Tensor forward(const Tensor& x) { return last(std::get<0>(lstm(x))); }
  nn::LSTM lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(16, 128).num_layers(2)));
  nn::Linear last = register_module("last", nn::Linear(128, 8));
};
struct SmallConvolutions : nn::Module {
  Tensor forward(const Tensor& x) { return last(norm(instance(torch::relu(norm_first(first(x))))).mean({2, 3})); }
  nn::Conv2d first = register_module("first", nn::Conv2d(nn::Conv2dOptions(3, 32, 3)));
  nn::BatchNorm2d norm_first = register_module("norm_first", nn::BatchNorm2d(32));
  nn::InstanceNorm2d instance = register_module(
      "instance", nn::InstanceNorm2d(nn::InstanceNorm2dOptions(32).affine(true).track_running_stats(true)));
  nn::GroupNorm norm = register_module("norm", nn::GroupNorm(4, 32));
  nn::Linear last = register_module("last", nn::Linear(32, 8));
};

// What forward() sees.
struct Watching : nn::Module {
  std::tuple<Tensor, std::vector<Tensor>> forward(const Tensor& x, std::optional<Tensor> y, const Tensor& n) {
    seen = {x.scalar_type(),
            y->scalar_type(),
            n.scalar_type(),
            (a->weight + 0).scalar_type(),
            a->weight.t().scalar_type(),
            kept->weight.t().scalar_type(),
            table.scalar_type()};
    return {a(x) + *y, {n, kept->bias + 0}};
  }
  nn::Linear a = register_module("a", nn::Linear(4, 4)), kept = register_module("kept", nn::Linear(4, 5));
  Tensor table = register_buffer("table", torch::ones({3}));
  std::vector<at::ScalarType> seen;
};

// A part with dtypes of its own, and in it a layer with others again.
struct Parts : nn::Module {
  struct Part : nn::Module {
    nn::Linear first = register_module("first", nn::Linear(12, 40)), last = register_module("last", nn::Linear(40, 12));
    Tensor table = register_buffer("table", torch::ones({12}));
    // The parameters' own dtypes do not tell in which ones operators compute.
    Tensor forward(const Tensor& x) {
      const auto in = [](nn::Linear& layer, const Tensor& y) { return layer(y.to((layer->weight + 0).dtype())); };
      return in(last, torch::tanh(in(first, x))) + table;
    }
  };
  Tensor forward(const Tensor& x) {
    seen = {(a->weight + 0).scalar_type(), (part->first->weight + 0).scalar_type(),
            (part->last->bias + 0).scalar_type(), table.scalar_type(), part->table.scalar_type()};
    return part->forward(torch::tanh(a(x))) + table;
  }
  nn::Linear a = register_module("a", nn::Linear(12, 12));
  std::shared_ptr<Part> part = register_module("part", std::make_shared<Part>());
  Tensor table = register_buffer("table", torch::ones({12}));
  std::vector<at::ScalarType> seen;
};

inline bool is_part(const nn::Module& module) { return dynamic_cast<const Parts::Part*>(&module) != nullptr; }
inline bool is_last(const nn::Module& module) {
  const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
  return linear && linear->options.in_features() == 40;
}

inline void expect_parts_with_their_own(auto wrap) {
  using enum at::ScalarType;
  const ModulePrecision of_part{.param_dtype = Double, .buffer_dtype = Double};
  MixedPrecision precision{.param_dtype = BFloat16, .buffer_dtype = Half};
  precision.of_module = [of_part](const nn::Module& module) -> std::optional<ModulePrecision> {
    if (is_last(module)) return ModulePrecision{};
    return is_part(module) ? std::optional(of_part) : std::nullopt;
  };
  on_hosts(kApart, [&](World&) {
    auto model = wrap(std::make_shared<Parts>(), precision);
    model(torch::ones({2, 12}));
    EXPECT_EQ(model.module()->seen, (std::vector<at::ScalarType>{BFloat16, Double, Float, Half, Double}));
    if constexpr (requires { model.synchronize(); }) model.synchronize();
  });
  // trained_alone() asks each layer.
  precision.buffer_dtype = {};
  precision.of_module = [of_part](const nn::Module& module) -> std::optional<ModulePrecision> {
    if (is_last(module)) return ModulePrecision{};
    const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
    return linear && linear->options.out_features() == 40 ? std::optional(of_part) : std::nullopt;
  };
  expect_steps_of_such_a_copy<Parts>(kTwoEach, precision, wrap, kLossOfFsdpNet);
}

// With several hosts: those of one layer travel in fewer bits, in buckets of their own.
inline void expect_gradients_of_a_layer_in_fewer_bits(auto wrap) {
  const MixedPrecision precision{.of_module = [](const nn::Module& module) -> std::optional<ModulePrecision> {
    const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
    const bool is_d = linear && linear->options.out_features() == 5;
    return is_d ? std::optional(ModulePrecision{.reduce_dtype = torch::kBFloat16}) : std::nullopt;
  }};
  on_hosts(kTwoEach, [&](World& world) {
    const auto net = make<FsdpNet>(7, {});
    auto model = wrap(net, precision);
    model(fsdp_input(world.rank(), 0)).square().sum().backward();
    size_t seen = 0;
    for (const auto& item : net->named_parameters()) {
      const Tensor& grad = item.value().grad();
      if (!grad.defined()) continue;
      ++seen;
      EXPECT_EQ(torch::equal(grad, grad.to(torch::kBFloat16).to(torch::kFloat)), item.key().starts_with("d."))
          << item.key();
    }
    EXPECT_GT(seen, 0u);
    for (const auto& names : model.bucket_names())
      for (const auto& name : names) EXPECT_EQ(name.starts_with("d."), names[0].starts_with("d.")) << name;
  });
}

// Without corners, at which a rounding error would change a derivative.
struct Smooth : nn::Module {
  bool checkpoints = false;
  nn::Linear a = register_module("a", nn::Linear(12, 100)), b = register_module("b", nn::Linear(100, 100)),
             c = register_module("c", nn::Linear(100, 5));
  Tensor forward(const Tensor& x) {
    const auto hidden = [this](const Tensor& at) { return torch::tanh(b(torch::tanh(a(at)))); };
    return c(checkpoints ? activation_checkpoint(kNoRandomNumbers, hidden, x) : hidden(x));
  }
};

inline void expect_models(auto wrap) {
  // A table that is also the last layer's weight: its two gradients are added in float32 here.
  expect_steps_of_such_a_copy<Transformer>(
      kApart, kBFloat16, wrap,
      [](auto& net, int rank, int step, at::ScalarType) { return net.forward(rank, step).to(torch::kFloat); }, 0.05);
  expect_steps_of_such_a_copy<SmallLstm>(kApart, kBFloat16, wrap,
                                         [](auto& net, int rank, int step, at::ScalarType dtype) {
                                           const Tensor x = drawn(rank, step, {5, 3, 16}).to(dtype);
                                           return net.forward(x).to(torch::kFloat).square().sum();
                                         });
  MixedPrecision precision = kBFloat16;
  precision.full_precision = is_group_norm;
  expect_steps_of_such_a_copy<SmallConvolutions>(kApart, precision, wrap,
                                                 [](auto& net, int rank, int step, at::ScalarType dtype) {
                                                   const Tensor x = drawn(rank, step, {4, 3, 9, 9}).to(dtype);
                                                   return net.forward(x).to(torch::kFloat).square().sum();
                                                 });
}

inline void expect_dtypes(auto wrap) {
  using enum at::ScalarType;
  MixedPrecision precision{
      .param_dtype = BFloat16, .buffer_dtype = Half, .full_precision = [](const nn::Module& module) {
        const auto* const linear = dynamic_cast<const nn::LinearImpl*>(&module);
        return linear && linear->options.out_features() == 5;
      }};
  const auto seen_with = [&] {
    auto model = wrap(std::make_shared<Watching>(), precision);
    const auto [first, second] = model(torch::ones({2, 4}), torch::ones({4}), torch::ones({2}, torch::kLong));
    auto seen = model.module()->seen;
    for (const Tensor& each : {first, second[0], second[1]}) seen.push_back(each.scalar_type());
    if constexpr (requires { model.synchronize(); }) model.synchronize();
    return seen;
  };
  using Types = std::vector<at::ScalarType>;
  EXPECT_EQ(seen_with(), (Types{BFloat16, BFloat16, Long, BFloat16, BFloat16, Float, Half, BFloat16, Long, Float}));
  precision.output_dtype = Double;
  precision.cast_forward_inputs = false;
  precision.param_dtype = {};
  EXPECT_EQ(seen_with(), (Types{Float, Float, Long, Float, Float, Float, Half, Double, Long, Double}));
}

// In float64 with copies in float32, what is computed can be compared with float64.
inline void expect_every_kind_of_step(const World& world, auto wrap) {
  const auto net = make<Smooth>(7, {}), alone = make<Smooth>(7, {});
  net->to(torch::kDouble);
  alone->to(torch::kDouble);
  auto model = wrap(net, MixedPrecision{.param_dtype = torch::kFloat, .output_dtype = torch::kDouble});
  const auto expect_same_gradients = [&](const char* what) {
    SCOPED_TRACE(what);
    for (const auto& item : net->named_parameters()) {
      if constexpr (requires { model.owner(item.value()); })
        if (model.owner(item.value()) != world.rank()) continue;
      const Tensor &grad = item.value().grad(), &expected = alone->named_parameters()[item.key()].grad();
      EXPECT_EQ(grad.scalar_type(), torch::kDouble);
      EXPECT_LE((grad - expected).norm().item<double>(), 1e-4 * expected.norm().item<double>()) << item.key();
    }
    net->zero_grad();
    alone->zero_grad();
  };
  const auto x = [&](int rank, int step) { return fsdp_input(rank, step).to(torch::kDouble).requires_grad_(); };
  const auto alone_for_all = [&](const std::function<Tensor(int rank)>& loss) {
    for (int r = 0; r < 4; ++r) (loss(r) / 4).backward();
  };
  {
    const auto guard = model.no_sync();
    model(x(world.rank(), 0)).sum().backward();
  }
  model(x(world.rank(), 1)).square().sum().backward();
  alone_for_all([&](int r) { return alone->forward(x(r, 0)).sum() + alone->forward(x(r, 1)).square().sum(); });
  expect_same_gradients("accumulation");

  const auto penalty = [&](const Tensor& y, const Tensor& of) {
    const Tensor gradient = torch::autograd::grad({y.square().sum()}, {of}, {}, true, true)[0];
    return gradient.square().sum() + y.sum();
  };
  const Tensor input = x(world.rank(), 3);
  penalty(model(input), input).backward();
  alone_for_all([&](int r) {
    const Tensor of = x(r, 3);
    return penalty(alone->forward(of), of);
  });
  expect_same_gradients("second derivatives");

  net->checkpoints = true;
  model(x(world.rank(), 4)).sum().backward();
  alone_for_all([&](int r) { return alone->forward(x(r, 4)).sum(); });
  expect_same_gradients("activation checkpoints");
}

// Outside of forward(), the module computes with the parameters themselves on the CPU; forward() computes with copies
// of them in `dtype` and on the device of fsdp_input().
inline void expect_values_in_forward_and_outside(const World& world, const FsdpOptions& options, at::ScalarType dtype) {
  const auto net = make<FsdpNet>(7, {}), other = make<FsdpNet>(7, {}), low = make<FsdpNet>(7, {});
  low->to(dtype);
  auto model = fully_shard(net, options);
  const Tensor x = fsdp_input(world.rank(), 0);
  const auto expected = [&] { return low->forward(x.cpu().to(dtype)).to(torch::kFloat); };
  const Tensor y = model(x);
  EXPECT_EQ(y.device(), x.device());
  EXPECT_TRUE(torch::equal(y.cpu(), expected()));
  EXPECT_TRUE(net->a->weight.is_cpu());
  EXPECT_EQ((net->a->weight + 0).scalar_type(), dtype);
  EXPECT_EQ((net->a->weight + 0).device(), x.device());
  model.gather();
  EXPECT_TRUE(torch::equal(net->forward(x.cpu()), other->forward(x.cpu())));
  net->eval();
  for (int step = 0; step <= world.rank(); ++step) EXPECT_TRUE(torch::equal(model(x).cpu(), expected()));
  model.synchronize();
  net->train();

  // New values while all are here.
  model.gather();
  {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : model.owned_parameters()) parameter.mul_(2);
    for (auto& parameter : low->parameters()) parameter.mul_(2);
  }
  EXPECT_TRUE(torch::equal(model(x).cpu(), expected()));
  model.synchronize();
  // Others by torch::load() or the like.
  if (options.strategy == ShardingStrategy::kFullShard) model.gather();
  for (auto& parameter : net->parameters()) parameter.set_data(torch::full_like(parameter, 0.01));
  const torch::NoGradGuard no_grad;
  for (auto& parameter : low->parameters()) parameter.fill_(0.01);
  EXPECT_TRUE(torch::equal(model(x).cpu(), expected()));
  model.synchronize();
}

inline void expect_old_graphs_to_fail(const World& world, const FsdpOptions& options) {
  const auto net = make<FsdpNet>(7, {});
  auto model = fully_shard(net, options);
  torch::optim::AdamW optimizer(net->parameters());
  const Tensor loss = model(fsdp_input(world.rank(), 0)).sum();
  loss.backward({}, /*retain_graph=*/true);
  optimizer.step();
  model(fsdp_input(world.rank(), 0)).sum().backward();
  EXPECT_CONTAINS(message_of<c10::Error>([&] { loss.backward(); }), "modified by an inplace operation");
  model.synchronize();
}

}  // namespace muster::test
