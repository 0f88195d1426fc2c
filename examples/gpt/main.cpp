// A language model, of a size that you choose, learns a text:
//
//   muster run -n 2 gpt --params 10M --sample 300
//
// The ranks of a host have one model together (FullyShardedDataParallel), those of all hosts (--strategy full), or each
// has one (--strategy ddp). The program first says how much memory the training needs, and then how much there is.
// --checkpoint computes activations again instead of keeping them; --snapshots FOLDER lets it resume where it was
// stopped.
#include <ATen/Parallel.h>
#include <muster/checkpoint/snapshot.h>
#include <muster/comm/collectives.h>
#include <muster/comm/world.h>
#include <muster/optim/autocast.h>
#include <muster/parallel/ddp.h>
#include <muster/parallel/fsdp.h>
#include <muster/parallel/memory_plan.h>
#include <torch/optim/adamw.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "model.h"

namespace {

struct Settings {
  std::string text = "/usr/share/common-licenses/GPL-3", strategy = "fsdp", precision = "float32", snapshots;
  double parameters = 2e6, rate = 1e-3;
  int64_t steps = 100, batch = 4, length = 128, sample = 0;
  bool checkpoint = false;
};

// A text as bytes [n].
torch::Tensor read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  if (text.empty())
    throw std::runtime_error("the text " + path + " is empty or cannot be read; name another with --text");
  return torch::from_blob(const_cast<char*>(text.data()), {static_cast<int64_t>(text.size())}, torch::kByte).clone();
}

// The batch of a rank in a step: pieces [batch, length + 1] of the text, always the same for the same step and rank.
torch::Tensor batch_of(const torch::Tensor& text, const Settings& with, int64_t step, int64_t rank) {
  auto random = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(step * 1'000'003 + rank));
  const auto starts = torch::randint(text.size(0) - with.length, {with.batch}, random, torch::kLong);
  std::vector<torch::Tensor> pieces;
  for (int64_t i = 0; i < with.batch; ++i) pieces.push_back(text.narrow(0, starts[i].item<int64_t>(), with.length + 1));
  return torch::stack(pieces).to(torch::kLong);
}

// A tenth of the steps upwards, then down to a tenth by a cosine.
double rate_at(int64_t step, const Settings& with) {
  const double done = static_cast<double>(step) / static_cast<double>(with.steps);
  if (done < 0.1) return with.rate * (done + 0.01) / 0.11;
  return with.rate * (0.1 + 0.45 * (1 + std::cos(std::numbers::pi * (done - 0.1) / 0.9)));
}

std::string written_by(Gpt& net, const torch::Tensor& beginning, int64_t count) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(1);
  auto text = beginning.to(torch::kLong).unsqueeze(0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t seen = std::min(text.size(1), net.sizes.length);
    const auto next = net.logits(text.narrow(1, text.size(1) - seen, seen)).select(1, seen - 1).to(torch::kFloat);
    text = torch::cat({text, torch::multinomial(torch::softmax(next / 0.7, 1), 1)}, 1);
  }
  std::string out;
  for (int64_t i = 0; i < text.size(1); ++i) out += static_cast<char>(text[0][i].item<int64_t>());
  return out;
}

// `model`: what the training calls instead of the net. Returns false if a stop was requested (SIGTERM).
template <typename Model>
bool train(Gpt& net, Model& model, muster::World& world, const torch::Tensor& text, const Settings& with,
           const muster::MemoryPlan& plan) {
  torch::optim::AdamW optimizer(net.parameters(), torch::optim::AdamWOptions(with.rate).betas({0.9, 0.95}));
  std::optional<muster::Snapshot> snapshot;
  if (!with.snapshots.empty()) {
    snapshot.emplace(muster::SnapshotOptions{.folder = with.snapshots, .every = 50, .sharded = true});
    snapshot->add("net", net).add("optimizer", optimizer);
  }
  const bool first = world.rank() == 0;
  auto start = std::chrono::steady_clock::now();
  int64_t since = snapshot ? snapshot->restore() : 0;
  for (int64_t step = since; step < with.steps; ++step) {
    optimizer.zero_grad();
    for (auto& group : optimizer.param_groups()) group.options().set_lr(rate_at(step, with));
    torch::Tensor loss;
    {
      const muster::Autocast autocast(torch::kBFloat16, torch::kCPU, with.precision == "bfloat16");
      loss = model(batch_of(text, with, step, world.rank()));
    }
    if (step == with.steps - 1) {
      const size_t measured = muster::memory_of_host(world);  // when the most is there
      if (first) std::printf("%s", plan.table(measured).c_str());
    }
    loss.backward();
    optimizer.step();
    if ((step + 1) % 10 == 0 || step + 1 == with.steps) {
      auto mean = loss.detach().clone();
      muster::all_reduce(mean, {.op = muster::ReduceOp::AVG});
      const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
      const auto tokens = static_cast<double>((step + 1 - since) * with.batch * with.length * world.world_size());
      if (first)
        std::printf("step %lld: loss %.3f, %.0f bytes/s\n", static_cast<long long>(step + 1), mean.item<double>(),
                    tokens / took.count());
      start = std::chrono::steady_clock::now();
      since = step + 1;
    }
    if (snapshot && snapshot->step(step + 1)) return false;
  }
  return true;
}

void run(const Settings& with) {
  at::set_num_threads(1);
  auto world = muster::init();
  const auto text = read(with.text);
  if (text.size(0) <= with.length) throw std::runtime_error("the text has fewer bytes than --length");
  torch::manual_seed(0);
  const auto net = std::make_shared<Gpt>(GptSizes::of(with.parameters, with.length));
  net->checkpointed = with.checkpoint;
  const bool sharded = with.strategy != "ddp", first = world.rank() == 0;
  muster::FsdpOptions options;
  if (with.precision == "mixed") {
    if (!sharded) throw std::runtime_error("--precision mixed is for --strategy fsdp and full; use bfloat16");
    options.mixed_precision.param_dtype = torch::kBFloat16;
  }
  if (with.strategy == "full") {
    options.strategy = muster::ShardingStrategy::kFullShard;
    options.is_unit = [](const torch::nn::Module& module) { return dynamic_cast<const Block*>(&module) != nullptr; };
  }

  std::optional<muster::FullyShardedDataParallel<Gpt>> fsdp;
  std::optional<muster::DistributedDataParallel<Gpt>> ddp;
  const auto forward = [&] {
    const muster::Autocast autocast(torch::kBFloat16, torch::kCPU, with.precision != "float32");
    return net->forward(batch_of(text, with, 0, world.rank()));
  };
  const auto plan = muster::memory_plan(*net, world, forward, {.fully_sharded = sharded, .fsdp = options});
  sharded ? static_cast<void>(fsdp.emplace(net, options)) : static_cast<void>(ddp.emplace(net));
  int64_t parameters = 0;
  for (const auto& parameter : net->parameters()) parameters += parameter.numel();
  if (first)
    std::printf("%.1f million parameters in %lld layers of width %lld\n%s", static_cast<double>(parameters) / 1e6,
                static_cast<long long>(net->sizes.layers), static_cast<long long>(net->sizes.width),
                plan.table().c_str());

  if (!(sharded ? train(*net, *fsdp, world, text, with, plan) : train(*net, *ddp, world, text, with, plan))) return;
  // All ranks have updated their parameters, and this host has them all.
  sharded ? fsdp->gather() : muster::barrier();
  const auto beginning = text.narrow(0, 0, std::min<int64_t>(20, text.size(0)));
  if (first && with.sample > 0) std::printf("%s\n", written_by(*net, beginning, with.sample).c_str());
  sharded ? fsdp->synchronize() : muster::barrier();
}

}  // namespace

int main(int argc, char** argv) {
  Settings with;
  CLI::App app{"A language model learns a text"};
  app.add_option("--params", with.parameters, "about how many parameters, e.g. 10M")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"K", 1e3}, {"M", 1e6}, {"G", 1e9}}));
  app.add_option("--text", with.text, "a file");
  app.add_option("--strategy", with.strategy, "fsdp: one model per host; full: one on all hosts; ddp: one per rank")
      ->check(CLI::IsMember({"fsdp", "full", "ddp"}));
  app.add_option("--precision", with.precision,
                 "bfloat16: of matrix products; mixed: of all that forward and backward compute")
      ->check(CLI::IsMember({"float32", "bfloat16", "mixed"}));
  app.add_flag("--checkpoint", with.checkpoint, "compute activations again in backward");
  app.add_option("--steps", with.steps);
  app.add_option("--batch", with.batch, "pieces of text per rank and step");
  app.add_option("--length", with.length, "of a piece, in bytes");
  app.add_option("--rate", with.rate, "the learning rate");
  app.add_option("--sample", with.sample, "how many bytes to write at the end");
  app.add_option("--snapshots", with.snapshots, "a folder, to resume from");
  CLI11_PARSE(app, argc, argv);
  try {
    run(with);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
  }
}
