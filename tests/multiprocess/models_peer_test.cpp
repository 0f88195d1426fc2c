// DistributedDataParallel and PyTorch's on the models of support/models.h: the same parameters and buffers to begin
// with, the same batches, the same options, and what two ranks come to.
#include <ATen/core/Dict.h>
#include <torch/serialize.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/parallel/comm_hooks.h"
#include "muster/parallel/zero_redundancy_optimizer.h"
#include "support/ask_python.h"
#include "support/models.h"
#include "support/temporary_folder.h"

namespace muster::test {
namespace {

// Gradients of the rows that a batch reads.
struct SparseWords : nn::Module {
  Tensor forward(int rank, int step) {
    const Tensor y = last(torch::tanh(table(words(rank, step, {6, 5}, 3000)))).flatten(0, 1);
    return torch::cross_entropy_loss(y, words(rank, step, {30}, 10));
  }
  nn::Embedding table = register_module("table", nn::Embedding(nn::EmbeddingOptions(3000, 32).sparse(true)));
  nn::Linear last = register_module("last", nn::Linear(32, 10));
};

using Losses = std::vector<double>;

DdpOptions options_of(const std::string& way, const std::string& name) {
  DdpOptions options;
  if (way == "small_buckets") options.bucket_cap_mb = options.first_bucket_cap_mb = 0.4;
  if (way == "static_graph") options.static_graph = true;
  if (way == "unused") options.find_unused_parameters = true;
  if (way == "ignored") options.ignored = {name};
  return options;
}

CommHook hook_of(const std::string& way) {
  if (way == "fp16") return comm_hooks::fp16_compress;
  if (way == "bf16") return comm_hooks::bf16_compress;
  return nullptr;
}

// As Python lists them: libtorch's parameters() in C++ have those of a shared module twice.
std::vector<Tensor> parameters_once(const nn::Module& net) {
  std::vector<Tensor> all;
  for (const Tensor& parameter : net.parameters())
    if (std::none_of(all.begin(), all.end(), [&](const Tensor& one) { return one.is_same(parameter); }))
      all.push_back(parameter);
  return all;
}

// The same as train() of models_peer.py.
template <typename Net>
Losses train(const std::shared_ptr<Net>& net, const std::string& way, const std::string& name, int rank, double rate,
             int steps) {
  DistributedDataParallel<Net> ddp(net, options_of(way, name));
  if (const CommHook hook = hook_of(way)) ddp.register_comm_hook(hook);
  const auto sgd = torch::optim::SGDOptions(rate).momentum(std::is_same_v<Net, SparseWords> ? 0 : 0.9);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (way == "zero")
    optimizer = std::make_unique<ZeroRedundancyOptimizer<torch::optim::SGD>>(parameters_once(*net), sgd);
  else
    optimizer = std::make_unique<torch::optim::SGD>(parameters_once(*net), sgd);
  Losses losses;
  const auto step_of = [&](int step) {
    optimizer->zero_grad();
    Tensor loss;
    if (way == "two_forwards") {
      const Tensor first = ddp(rank, 2 * step);
      loss = first + ddp(rank, 2 * step + 1);
      loss.backward();
    } else if (way == "no_sync") {
      {
        const auto no_sync = ddp.no_sync();
        loss = ddp(rank, 2 * step);
        loss.backward();
      }
      const Tensor second = ddp(rank, 2 * step + 1);
      second.backward();
      loss = loss.detach() + second;
    } else {
      loss = ddp(rank, step);
      loss.backward();
    }
    optimizer->step();
    losses.push_back(loss.template item<double>());
  };
  if (way == "join")
    ddp.join([&] {
      for (int step = 0; step < steps - rank; ++step) step_of(step);
    });
  else
    for (int step = 0; step < steps; ++step) step_of(step);
  return losses;
}

c10::impl::GenericDict values_of(const nn::Module& net) {
  c10::Dict<std::string, Tensor> all;
  for (const auto& item : net.named_parameters()) all.insert(item.key(), item.value().detach());
  for (const auto& item : net.named_buffers()) all.insert(item.key(), item.value());
  return c10::impl::toGenericDict(all);
}

// How far apart parameters may be, of how far they have moved. Nets without sums in another order than PyTorch's are
// equal to the bit here. Where the last bit of a gradient differs, a hook may round it the other way.
constexpr double kApart = 1e-6;
const std::map<std::string, double> kRounded = {{"fp16", 2e-3}, {"bf16", 2e-2}};

// Trains on two ranks in these ways, and asks PyTorch for the same.
class Peer {
 public:
  template <typename Net>
  void add(const std::string& model, double rate, const std::vector<std::string>& ways) {
    for (const std::string& way : ways) add_one<Net>(model, rate, way);
  }

  void compare() const {
    const auto answers = ask_python("multiprocess/models_peer.py", questions_);
    ASSERT_EQ(answers.size(), questions_.size());
    for (size_t i = 0; i < answers.size(); ++i) {
      SCOPED_TRACE(questions_[i]);
      EXPECT_LE(farthest(trained_[i].losses, answers[i]), trained_[i].apart * largest(torch::tensor(answers[i])));
      Values expected;
      for (const auto& item : torch::pickle_load(read(file(i) + ".after")).toGenericDict())
        expected.insert(item.key().toStringRef(), item.value().toTensor());
      expect_moved_alike(trained_[i], expected);
    }
  }

 private:
  struct Trained {
    Values before, after;  // parameters; after the steps also buffers
    Losses losses;         // of rank 0, and then of rank 1
    double apart = kApart;
  };

  std::string file(size_t question) const { return folder_ / text(question); }

  static std::vector<char> read(const std::string& path) {
    std::ifstream in(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  // way: with ":" and the name of a parameter behind it where it needs one
  template <typename Net>
  void add_one(const std::string& model, double rate, const std::string& way) {
    const int steps = full_run() ? 8 : 3;
    const size_t colon = way.find(':');
    const std::string kind = way.substr(0, colon), name = colon == std::string::npos ? "" : way.substr(colon + 1);
    const std::string path = file(questions_.size());
    const auto first = make<Net>(7, nullptr);
    const auto bytes = torch::pickle_save(values_of(*first));
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));

    Trained trained;
    trained.before = copies(first->named_parameters());
    if (const auto rounded = kRounded.find(kind); rounded != kRounded.end()) trained.apart = rounded->second;
    std::array<Losses, kRanks> losses;
    run_threads(kRanks,
                [&](World& world) {
                  at::set_num_threads(1);
                  const auto net = make<Net>(7, nullptr);
                  losses[static_cast<size_t>(world.rank())] = train(net, kind, name, world.rank(), rate, steps);
                  if (world.rank() > 0) return;
                  trained.after = copies(net->named_parameters());
                  if (kind == "join") return;  // it ends with one rank's buffers on all, and PyTorch chooses another
                  for (const auto& item : net->named_buffers()) trained.after.insert(item.key(), item.value().clone());
                },
                {.timeout = kPatience});
    trained.losses = losses[0];
    trained.losses.insert(trained.losses.end(), losses[1].begin(), losses[1].end());
    const auto dtype = torch::get_default_dtype() == caffe2::TypeMeta::Make<double>() ? "float64" : "float32";
    questions_.push_back(text(model, ' ', dtype, ' ', way, ' ', rate, ' ', steps, ' ', path));
    trained_.push_back(std::move(trained));
  }

  static void expect_moved_alike(const Trained& ours, const Values& expected) {
    const torch::NoGradGuard no_grad;
    for (const auto& item : ours.after) {
      const Tensor* const theirs = expected.find(item.key());
      ASSERT_TRUE(theirs) << item.key();
      if (theirs->numel() == 0) continue;
      if (!theirs->is_floating_point()) {
        EXPECT_TRUE(torch::equal(item.value(), *theirs)) << item.key();
        continue;
      }
      const Tensor* const before = ours.before.find(item.key());
      const double moved = before ? largest(*theirs - *before) : largest(*theirs);
      EXPECT_LE(largest(item.value() - *theirs), ours.apart * moved) << item.key();
    }
  }

  TemporaryFolder folder_;
  std::vector<std::string> questions_;
  std::vector<Trained> trained_;
};

TEST(ModelsPeer, EqualToPyTorchsDdp) {
  if (!python_has("torch")) GTEST_SKIP() << "no Python with torch ('" << kPython << "'): pip install torch==2.13.0";
  Peer peer;
  const auto ways = [](std::vector<std::string> in_the_gate, const std::string& ignored) {
    if (!full_run()) return in_the_gate;
    return std::vector<std::string>{"plain",   "small_buckets", "static_graph", "zero", "join",
                                    "no_sync", "two_forwards",  "fp16",         "bf16", "ignored:" + ignored};
  };
  peer.add<ResNet18>("ResNet18", 0.05, ways({"plain", "zero"}, "layers.0.weight"));
  peer.add<WideConvolutions>("WideConvolutions", 1e-3,
                             ways({"small_buckets", "static_graph", "bf16"}, "second.weight"));
  peer.add<Mixed>("Mixed", 0.5, {"unused"});
  peer.add<SparseWords>("SparseWords", 0.5, {"plain"});
  {
    // In C++, attention takes other operators than in Python, and the LSTM sums in another order: in floats, some
    // gradients that are zero but for roundings are nothing but those.
    const InDoubles in_doubles;
    peer.add<Transformer>("Transformer", 0.05, ways({"join", "two_forwards"}, "table.weight"));
    peer.add<Recurrent>("Recurrent", 0.5, ways({"no_sync", "fp16", "ignored:last.weight"}, "last.weight"));
  }
  peer.compare();
}

}  // namespace
}  // namespace muster::test
