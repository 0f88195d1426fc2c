// token_scale(): the mean over all tokens of all ranks and batches, however they are divided.
#include <gtest/gtest.h>
#include <torch/nn.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <span>
#include <tuple>
#include <vector>

#include "muster/base/error.h"
#include "muster/comm/world.h"
#include "muster/parallel/ddp.h"
#include "muster/parallel/token_scale.h"

namespace muster::test {
namespace {

struct WordVectors : torch::nn::Module {
  torch::nn::Embedding embedding = register_module("embedding", torch::nn::Embedding(20, 16));
  torch::nn::LSTM lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(16, 24).batch_first(true)));
  torch::nn::Linear out = register_module("out", torch::nn::Linear(24, 20));
  torch::Tensor forward(const torch::Tensor& words) { return out(std::get<0>(lstm(embedding(words)))); }
};

std::shared_ptr<WordVectors> make_word_vectors() {
  torch::manual_seed(3);
  auto net = std::make_shared<WordVectors>();
  net->to(torch::kDouble);
  return net;
}

torch::Tensor sentence(int64_t length) {
  return torch::arange(length + 1).mul(7).add(length).remainder(20).unsqueeze(0);
}

template <typename Model>
torch::Tensor loss_of_sentence(Model&& model, int64_t length) {
  const auto words = sentence(length);
  return torch::cross_entropy_loss(model(words.narrow(1, 0, length)).squeeze(0), words.narrow(1, 1, length).squeeze(0),
                                   {}, torch::Reduction::Sum);
}

// With the gradients of the mean over all tokens of the sentences.
std::shared_ptr<WordVectors> trained_alone(const std::vector<int64_t>& lengths) {
  auto net = make_word_vectors();
  torch::Tensor sum = torch::zeros({}, torch::kDouble);
  for (const int64_t length : lengths)
    sum = sum + loss_of_sentence([&](const auto& words) { return net->forward(words); }, length);
  (sum / static_cast<double>(std::reduce(lengths.begin(), lengths.end()))).backward();
  return net;
}

void expect_equal_gradients(const WordVectors& net, const WordVectors& expected) {
  for (const auto& named : expected.named_parameters())
    EXPECT_TRUE(torch::allclose(net.named_parameters()[named.key()].grad(), named.value().grad(), 1e-12, 1e-14))
        << named.key();
}

// Sentences of unequal lengths, accumulated: one process with all of them, two ranks with two batches each, three ranks
// of which one has no token at all. All have the same gradients.
TEST(TokenScale, TheMeanIsOverAllTokens) {
  const std::vector<int64_t> lengths{3, 17, 1, 8};
  const auto whole = trained_alone(lengths);
  std::vector<std::shared_ptr<WordVectors>> nets;
  for (int i = 0; i < 5; ++i) nets.push_back(make_word_vectors());
  for (const int ranks : {2, 3}) {
    run_threads(ranks, [&](World& world) {
      const auto& net = nets[static_cast<size_t>(ranks == 2 ? world.rank() : 2 + world.rank())];
      DistributedDataParallel<WordVectors> ddp(net);
      std::vector<int64_t> mine;  // rank 2 of 3 has an empty part of a sentence
      for (size_t i = 0; i < lengths.size(); ++i)
        if (static_cast<int>(i) % 2 == world.rank()) mine.push_back(lengths[i]);
      const double scale = token_scale(static_cast<double>(std::accumulate(mine.begin(), mine.end(), int64_t{0})));
      EXPECT_DOUBLE_EQ(scale, ranks / 29.0);
      const auto backward = [&](int64_t length) {
        const auto part = length > 0 ? loss_of_sentence([&](const auto& words) { return ddp(words); }, length)
                                     : ddp(sentence(3).narrow(1, 0, 3)).sum() * 0;
        (part * scale).backward();
      };
      if (mine.empty()) mine = {0, 0};
      {
        const auto guard = ddp.no_sync();
        backward(mine[0]);
      }
      backward(mine[1]);
      expect_equal_gradients(*net, *whole);
      EXPECT_EQ(token_scale(0), 0);
      for (const double wrong : {-1.0, std::nan(""), HUGE_VAL})
        EXPECT_THROW(token_scale(world.rank() == 0 ? wrong : 4), InvalidArgument);
      EXPECT_DOUBLE_EQ(token_scale(1e300), 1e-300);
    });
  }
}

// One batch of 32 sentences, or four ranks that accumulate four batches of two each.
TEST(TokenScale, ABatchOf32IsFourRanksTimesFourBatchesOfTwo) {
  constexpr size_t kRanks = 4, kBatches = 4, kPerBatch = 2;
  std::vector<int64_t> lengths;
  for (int64_t i = 0; i < 32; ++i) lengths.push_back(1 + i * i % 13);
  ASSERT_EQ(lengths.size(), kRanks * kBatches * kPerBatch);
  const auto whole = trained_alone(lengths);
  std::vector<std::shared_ptr<WordVectors>> nets;
  for (size_t i = 0; i < kRanks; ++i) nets.push_back(make_word_vectors());
  run_threads(kRanks, [&](World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    DistributedDataParallel<WordVectors> ddp(nets[rank]);
    const auto mine = std::span(lengths).subspan(rank * kBatches * kPerBatch, kBatches * kPerBatch);
    const double scale = token_scale(static_cast<double>(std::reduce(mine.begin(), mine.end())));
    const auto backward = [&](size_t batch) {
      torch::Tensor loss = torch::zeros({}, torch::kDouble);
      for (const int64_t length : mine.subspan(batch * kPerBatch, kPerBatch))
        loss = loss + loss_of_sentence([&](const auto& words) { return ddp(words); }, length);
      (loss * scale).backward();
    };
    {
      const auto guard = ddp.no_sync();
      for (size_t batch = 0; batch + 1 < kBatches; ++batch) backward(batch);
    }
    backward(kBatches - 1);
    expect_equal_gradients(*nets[rank], *whole);
  });
}

}  // namespace
}  // namespace muster::test
