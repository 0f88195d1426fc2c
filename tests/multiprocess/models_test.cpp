// DistributedDataParallel on the models of support/models.h, and meta-gradients through steps of their training.
#include <torch/csrc/autograd/autograd.h>
#include <torch/optim/adam.h>

#include <stdexcept>

#include "muster/optim/meta.h"
#include "support/models.h"

namespace muster::test {
namespace {

TEST(Models, ResNet18) { expect_as_alone<DistributedDataParallel, ResNet18>({.rate = 0.05}); }
TEST(Models, WideConvolutions) { expect_as_alone<DistributedDataParallel, WideConvolutions>({.rate = 1e-3}); }
TEST(Models, TransformerWithTiedEmbeddings) { expect_as_alone<DistributedDataParallel, Transformer>(); }
TEST(Models, TwoLayersOfLstm) { expect_as_alone<DistributedDataParallel, Recurrent>({.rate = 0.5}); }

// --- one process that takes the whole batch ---

// In doubles: in floats the sums over a batch are rounded elsewhere than the sums over its halves. (A residual net
// normalizes by the batch, so only synchronized batch norms train it alike, models_graph_test.cpp; what `Mixed` uses
// depends on the rank.)
template <typename Net>
void expect_as_with_the_whole_batch(double rate, bool loss_is_a_sum = false) {
  const InDoubles in_doubles;
  const int steps = full_run() ? 20 : 3;
  const auto train = [&](Net& net, const auto& loss_of) {
    torch::optim::SGD optimizer(net.parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
    for (int step = 0; step < steps; ++step) {
      optimizer.zero_grad();
      loss_of(step).backward();
      optimizer.step();
    }
  };
  at::set_num_threads(1);
  const auto alone = make<Net>(7, {});
  const Values before = copies(alone->named_parameters());
  train(*alone, [&](int step) { return alone->forward(kWholeBatch, step) / (loss_is_a_sum ? kRanks : 1); });
  run_threads(kRanks,
              [&](World& world) {
                at::set_num_threads(1);
                const auto net = make<Net>(7 + static_cast<uint64_t>(world.rank()), {});
                DistributedDataParallel<Net> ddp(net);
                train(*net, [&](int step) { return ddp(world.rank(), step); });
                expect_close(*net, *alone, before, {.apart = 1e-9});
              },
              {.timeout = kPatience});
}

TEST(Models, AWholeBatchOfPicturesInOneProcess) { expect_as_with_the_whole_batch<WideConvolutions>(1e-3, true); }
TEST(Models, AWholeBatchOfWordsInOneProcess) { expect_as_with_the_whole_batch<Transformer>(0.05); }
TEST(Models, AWholeBatchOfSeriesInOneProcess) { expect_as_with_the_whole_batch<Recurrent>(0.5); }

// --- meta-learning on the same models ---

// Two steps of SGD with momentum, written out, by libtorch's engine. Returns the gradient of the loss after them with
// respect to the net's parameters.
template <typename Net>
std::vector<Tensor> meta_gradient_by_hand(Net& net, double rate) {
  const auto first = net.parameters();
  optim::NamedTensors now;
  for (const auto& item : net.named_parameters()) now.emplace_back(item.key(), item.value());
  const auto loss = [&](int step) { return optim::functional_call(net, now, [&] { return net.forward(0, step); }); };
  std::vector<Tensor> momentum;
  for (int step = 0; step < 2; ++step) {
    std::vector<Tensor> parameters;
    for (const auto& [name, tensor] : now) parameters.push_back(tensor);
    const auto gradients = torch::autograd::grad({loss(step)}, parameters, {}, true, true);
    for (size_t i = 0; i < gradients.size(); ++i) {
      if (step == 0) momentum.push_back(gradients[i]);
      if (step > 0) momentum[i] = 0.9 * momentum[i] + gradients[i];
      now[i].second = parameters[i] - rate * momentum[i];
    }
  }
  return torch::autograd::grad({loss(2)}, first);
}

// Two steps of MetaSGD are those of torch::optim::SGD, and the gradient of the loss after them, with respect to the
// parameters before, is that of the steps written out; and, if the net has no bends at which the steps themselves would
// jump, the slope in a random direction.
template <typename Net>
void expect_meta_gradient(double rate, bool smooth) {
  at::set_num_threads(1);
  const InDoubles in_doubles;
  const auto start = make<Net>(7, nullptr);
  const auto adapt = [&](const optim::ModuleState& from) {
    const auto net = make<Net>(8, nullptr);
    optim::recover_state_dict(*net, from);
    optim::MetaSGD inner(*net, {.lr = rate, .momentum = 0.9});
    for (int step = 0; step < 2; ++step) inner.step(net->forward(0, step));
    return net;
  };
  const auto state = optim::extract_state_dict(*start, {.detach_buffers = true});
  const auto adapted = adapt(state);
  {
    const auto alone = make<Net>(7, nullptr);
    torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(rate).momentum(0.9));
    for (int step = 0; step < 2; ++step) {
      sgd.zero_grad();
      alone->forward(0, step).backward();
      sgd.step();
    }
    const auto expected = alone->named_parameters();
    for (const auto& item : adapted->named_parameters())
      EXPECT_LE(largest(item.value() - expected[item.key()]), 1e-9 * largest(expected[item.key()])) << item.key();
    for (const auto& item : adapted->named_buffers())
      EXPECT_LE(largest(item.value() - alone->named_buffers()[item.key()]), 1e-9) << item.key();
  }
  const auto gradients = torch::autograd::grad({adapted->forward(0, 2)}, start->parameters());
  const auto other = make<Net>(7, nullptr);
  const auto expected = meta_gradient_by_hand(*other, rate);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(largest(gradients[i] - expected[i]), 1e-9 * largest(expected[i])) << i;
  if (!smooth) return;
  torch::manual_seed(3);
  std::vector<Tensor> direction;
  double slope = 0;
  for (size_t i = 0; i < gradients.size(); ++i) {
    direction.push_back(
        torch::randn_like(gradients[i]) * gradients[i].norm() / std::sqrt(double(gradients[i].numel())) + gradients[i]);
    slope += (direction[i] * gradients[i]).sum().template item<double>();
  }
  const auto loss_at = [&](double along) {
    auto moved = optim::extract_state_dict(*start, {.by = optim::CopyMode::kDeepCopy, .detach_buffers = true});
    const torch::NoGradGuard values_only;
    for (size_t i = 0; i < moved.parameters.size(); ++i) moved.parameters[i].second.add_(direction[i], along);
    const torch::AutoGradMode record(true);
    return adapt(moved)->forward(0, 2).template item<double>();
  };
  const double step = 1e-5 / std::sqrt(slope);
  EXPECT_GT(slope, 0);
  EXPECT_NEAR((loss_at(step) - loss_at(-step)) / (2 * step), slope, 1e-4 * slope);
}

TEST(Models, MetaGradientOfResNet18) { expect_meta_gradient<ResNet18>(0.01, false); }
TEST(Models, MetaGradientOfWideConvolutions) { expect_meta_gradient<WideConvolutions>(1e-3, true); }
TEST(Models, MetaGradientOfATransformerWithTiedEmbeddings) { expect_meta_gradient<Transformer>(0.05, false); }
TEST(Models, MetaGradientOfTwoLayersOfLstm) { expect_meta_gradient<Recurrent>(0.5, true); }

TEST(Models, FrozenUnusedSharedAndEmptyParameters) {
  expect_as_alone<DistributedDataParallel, Mixed>({.rate = 0.5, .find_unused_parameters = true});
}

TEST(Models, InBFloat16) {
  const Prepare halved = [](nn::Module& net) { net.to(torch::kBFloat16); };
  const Tolerance coarse{.moved = 0.02};  // a rounding is 0.004
  expect_as_alone<DistributedDataParallel, WideConvolutions>({.prepare = halved, .rate = 4e-3, .tolerance = coarse});
  expect_as_alone<DistributedDataParallel, Transformer>({.prepare = halved, .rate = 0.5, .tolerance = coarse});
  expect_as_alone<DistributedDataParallel, Recurrent>({.prepare = halved, .rate = 4, .tolerance = coarse});
  expect_as_alone<DistributedDataParallel, ResNet18>({.prepare = halved, .rate = 1, .tolerance = coarse});
}

TEST(Models, ChannelsLast) {
  const Prepare turned = [](nn::Module& net) {
    for (auto& parameter : net.parameters())
      if (parameter.dim() == 4) parameter.set_data(parameter.contiguous(torch::MemoryFormat::ChannelsLast));
  };
  expect_as_alone<DistributedDataParallel, WideConvolutions>({.prepare = turned, .rate = 1e-3});
  expect_as_alone<DistributedDataParallel, ResNet18>({.prepare = turned, .rate = 0.05});
}

TEST(Models, ParametersOnTheHeap) {
  const Prepare moved = [](nn::Module& net) {
    if (World* const world = World::current_or_null())
      for (auto& parameter : net.parameters())
        parameter.set_data(world->heap().empty(parameter.sizes()).copy_(parameter.detach()));
  };
  expect_as_alone<DistributedDataParallel, Recurrent>({.prepare = moved, .rate = 0.5});
  expect_as_alone<DistributedDataParallel, Transformer>({.prepare = moved});
  expect_as_alone<DistributedDataParallel, WideConvolutions>({.prepare = moved, .rate = 1e-3});
  if (full_run()) expect_as_alone<DistributedDataParallel, ResNet18>({.prepare = moved, .rate = 0.05});
}

TEST(Models, WithTheAllocatorLeftAlone) {
  expect_as_alone<DistributedDataParallel, WideConvolutions>({.rate = 1e-3, .replace_allocator = false});
}

// --- what a training does besides ---

// Two small batches for each step, the first in no_sync(); gradients are clipped; in one step backward() throws on all
// ranks, and in the middle of the training the DDP object is destroyed and another one made.
TEST(Models, AccumulationClippingAnExceptionAndASecondDdp) {
  constexpr int kSteps = 6, kThrows = 2, kAgain = 4;
  const auto update = [](WideConvolutions& net, torch::optim::SGD& optimizer) {
    nn::utils::clip_grad_norm_(net.parameters(), 0.5);
    optimizer.step();
  };
  at::set_num_threads(1);
  const auto alone = make<WideConvolutions>(7, {});
  const Values before = copies(alone->named_parameters());
  torch::optim::SGD sgd(alone->parameters(), torch::optim::SGDOptions(0.1));
  for (int step = 0; step < kSteps; ++step) {
    if (step == kThrows) continue;
    sgd.zero_grad();
    for (int rank = 0; rank < kRanks; ++rank)
      for (const int half : {0, 1}) (alone->forward(rank, 2 * step + half) / kRanks).backward();
    update(*alone, sgd);
  }
  run_threads(kRanks,
              [&](World& world) {
                const auto net = make<WideConvolutions>(7 + static_cast<uint64_t>(world.rank()), {});
                auto ddp = std::make_unique<DistributedDataParallel<WideConvolutions>>(net);
                torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
                for (int step = 0; step < kSteps; ++step) {
                  if (step == kAgain) {
                    ddp.reset();
                    ddp = std::make_unique<DistributedDataParallel<WideConvolutions>>(net);
                  }
                  optimizer.zero_grad();
                  if (step == kThrows) {
                    Tensor loss = (*ddp)(world.rank(), 2 * step);
                    const auto hook = net->first->weight.register_hook(
                        [](const Tensor&) { throw std::runtime_error("in the middle"); });
                    EXPECT_THROW(loss.backward(), std::exception);
                    net->first->weight.remove_hook(hook);
                    continue;
                  }
                  {
                    const auto no_sync = ddp->no_sync();
                    (*ddp)(world.rank(), 2 * step).backward();
                  }
                  (*ddp)(world.rank(), 2 * step + 1).backward();
                  update(*net, optimizer);
                }
                expect_close(*net, *alone, before, kAmplified);
              },
              {.timeout = kPatience});
}

// Two models and two optimizers, three backward passes in a step, of which one goes through both models.
struct GanTraining {
  GanTraining(nn::Module& generator, nn::Module& discriminator)
      : of_generator(generator.parameters(), 1e-3), of_discriminator(discriminator.parameters(), 1e-3) {}
  torch::optim::Adam of_generator, of_discriminator;
  double share = 1;  // of each rank's loss
  // While its result lives, the discriminator's gradients are this rank's own.
  std::function<std::shared_ptr<void>()> no_sync = [] { return nullptr; };

  void step(const GanLosses& losses, int step, const std::vector<int>& ranks) {
    of_discriminator.zero_grad();
    for (const int rank : ranks) {
      {
        const auto alone = no_sync();
        (share * losses.real(rank, step)).backward();
      }
      (share * losses.fake(rank, step)).backward();
    }
    of_discriminator.step();
    of_generator.zero_grad();
    const auto alone = no_sync();
    for (const int rank : ranks) (share * losses.deceived(rank, step)).backward();
    of_generator.step();
  }
};

// The ranks have so many batches.
void expect_gan_as_alone(const std::vector<int>& batches, bool synchronizes_each) {
  at::set_num_threads(1);
  const auto generator = make<Generator>(7, {});
  const auto discriminator = make<Discriminator>(8, {});
  const Values before_g = copies(generator->named_parameters()), before_d = copies(discriminator->named_parameters());
  GanTraining alone(*generator, *discriminator);
  alone.share = 1.0 / kRanks;
  for (int step = 0; step < std::max(batches[0], batches[1]); ++step) {
    std::vector<int> with_data;
    for (int rank = 0; rank < kRanks; ++rank)
      if (step < batches[static_cast<size_t>(rank)]) with_data.push_back(rank);
    alone.step({[&](const Tensor& z) { return generator->forward(z); },
                [&](const Tensor& x) { return discriminator->forward(x); }},
               step, with_data);
  }
  run_threads(kRanks,
              [&](World& world) {
                at::set_num_threads(1);
                const auto seed = 7 + 2 * static_cast<uint64_t>(world.rank());
                const auto g = make<Generator>(seed, {});
                const auto d = make<Discriminator>(seed + 1, {});
                DistributedDataParallel ddp_g(g);
                DistributedDataParallel ddp_d(d);
                GanTraining training(*g, *d);
                if (!synchronizes_each)
                  training.no_sync = [&] { return std::shared_ptr<void>(new auto(ddp_d.no_sync())); };
                const auto train = [&] {
                  for (int step = 0; step < batches[static_cast<size_t>(world.rank())]; ++step)
                    training.step(
                        {[&](const Tensor& z) { return ddp_g(z); }, [&](const Tensor& x) { return ddp_d(x); }}, step,
                        {world.rank()});
                };
                if (batches[0] == batches[1])
                  train();
                else
                  ddp_g.join(train, {.after_backward = [&] { training.of_generator.step(); },
                                     .with = {{ddp_d, [&] { training.of_discriminator.step(); }}}});
                expect_close(*g, *generator, before_g, kAmplified);
                expect_close(*d, *discriminator, before_d, kAmplified);
              },
              {.timeout = kPatience});
}
TEST(Models, Gan) {
  const int steps = full_run() ? 20 : 3;
  for (const bool synchronizes_each : {true, false}) expect_gan_as_alone({steps, steps}, synchronizes_each);
}
TEST(Models, GanWithFewerBatchesOnARank) {
  const int steps = full_run() ? 20 : 3;
  expect_gan_as_alone({steps, steps - 1}, /*synchronizes_each=*/false);
  expect_gan_as_alone({1, steps}, /*synchronizes_each=*/false);
}

// One parameter of 512 MB, with its gradient four times of it in memory and once more for the process alone.
struct Huge : nn::Module {
  Tensor forward(int rank, int step) {
    const Tensor x = drawn(rank, step, {4, 1 << 15});
    return weight.slice(0, 0, 4).mul(x).sum() + weight.slice(0, -4).mul(x).sum();
  }
  Tensor weight = register_parameter("weight", torch::ones({1 << 12, 1 << 15}));
};
TEST(ModelsLarge, AParameterOf512MB) { expect_as_alone<DistributedDataParallel, Huge>({.steps = 2}); }

}  // namespace
}  // namespace muster::test
