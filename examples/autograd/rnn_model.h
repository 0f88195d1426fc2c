// The word language model of rnn.cpp: a table of vectors, an LSTM and a decoder, on two workers or in one process.
//
// Thread-safety: there is one trainer, so no two handlers of an object run concurrently.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <muster/autograd/context.h>
#include <muster/optim/distributed_optimizer.h>
#include <muster/rpc/rref.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/rnn.h>
#include <torch/optim/sgd.h>
#include <torch/utils.h>

#include <cstdint>
#include <functional>
#include <tuple>
#include <utility>
#include <vector>

struct ModelSizes {
  int64_t words = 0;  // in the vocabulary
  int64_t embedding = 64, hidden = 64, layers = 1;
  double dropout = 0.2, lr = 4;
  int64_t seed = 1;
};

inline at::Generator generator_of(int64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(seed));
}

// A mask depends on the seed and on the number of masks before it, not on other random numbers of the process. So the
// twin has the same masks.
class Dropout {
 public:
  Dropout(double rate, int64_t seed) : rate_(rate), generator_(generator_of(seed)) {}
  at::Tensor operator()(const at::Tensor& x, bool training) {
    if (!training || rate_ == 0) return x;
    return x * at::empty(x.sizes(), x.options()).bernoulli_(1 - rate_, generator_).div_(1 - rate_);
  }

 private:
  const double rate_;
  at::Generator generator_;
};

// --- what lives on the parameter server ---

class EmbeddingTable {
 public:
  EmbeddingTable(int64_t words, int64_t size, double dropout, int64_t seed)
      : encoder_(words, size), drop_(dropout, seed) {
    const at::NoGradGuard no_grad;
    encoder_->weight.uniform_(-0.1, 0.1, generator_of(seed));
  }
  at::Tensor forward(const at::Tensor& words, bool training) { return drop_(encoder_->forward(words), training); }
  std::vector<at::Tensor> parameters() const { return encoder_->parameters(); }
  std::vector<muster::optim::ParameterRef> parameter_rrefs() const {
    return muster::optim::parameter_rrefs(parameters());
  }

 private:
  torch::nn::Embedding encoder_;
  Dropout drop_;
};

class Decoder {
 public:
  Decoder(int64_t words, int64_t hidden, double dropout, int64_t seed) : decoder_(hidden, words), drop_(dropout, seed) {
    const at::NoGradGuard no_grad;
    decoder_->weight.uniform_(-0.1, 0.1, generator_of(seed));
    decoder_->bias.zero_();
  }
  at::Tensor forward(const at::Tensor& output, bool training) { return decoder_->forward(drop_(output, training)); }
  std::vector<at::Tensor> parameters() const { return decoder_->parameters(); }
  std::vector<muster::optim::ParameterRef> parameter_rrefs() const {
    return muster::optim::parameter_rrefs(parameters());
  }

 private:
  torch::nn::Linear decoder_;
  Dropout drop_;
};

// --- what lives on the trainer ---

// The LSTM, between an embedding and a decoder that may be anywhere.
class Recurrent {
 public:
  using Hidden = std::tuple<at::Tensor, at::Tensor>;
  using Piece = std::function<at::Tensor(const at::Tensor& x, bool training)>;

  Recurrent(const ModelSizes& sizes, Piece embed, Piece decode)
      : embed_(std::move(embed)), decode_(std::move(decode)), seed_(static_cast<uint64_t>(sizes.seed)) {
    torch::manual_seed(seed_);
    lstm_ = torch::nn::LSTM(torch::nn::LSTMOptions(sizes.embedding, sizes.hidden)
                                .num_layers(sizes.layers)
                                .dropout(sizes.layers > 1 ? sizes.dropout : 0));  // libtorch's, between layers
  }

  // The mean of -log p(y) over the words x, where y are the words that come next; both are [time, batch]. `hidden` goes
  // on to the next stretch of the text. Gradients do not: this is truncated backpropagation through time.
  at::Tensor loss(const at::Tensor& x, const at::Tensor& y, Hidden& hidden, bool training) {
    lstm_->train(training);
    if (training) torch::manual_seed(++seed_);  // for the masks between layers, which the twin must have, too
    const auto [output, carried] = lstm_->forward(embed_(x, training), hidden);
    hidden = {std::get<0>(carried).detach(), std::get<1>(carried).detach()};
    return at::cross_entropy_loss(decode_(output, training).flatten(0, 1), y.flatten());
  }
  Hidden zeros(int64_t batch) const {
    const at::Tensor one = at::zeros({lstm_->options.num_layers(), batch, lstm_->options.hidden_size()});
    return {one, one};
  }
  std::vector<at::Tensor> parameters() const { return lstm_->parameters(); }

 private:
  const Piece embed_, decode_;
  uint64_t seed_;
  torch::nn::LSTM lstm_{nullptr};
};

// The model with its table and its decoder on the worker "ps".
class DistributedModel {
 public:
  explicit DistributedModel(const ModelSizes& s)
      : table_(muster::rpc::remote<EmbeddingTable>("ps", s.words, s.embedding, s.dropout, s.seed)),
        decoder_(muster::rpc::remote<Decoder>("ps", s.words, s.hidden, s.dropout, s.seed + 1)),
        recurrent_(
            s,
            [table = table_](const at::Tensor& x, bool training) {
              return table.sync<&EmbeddingTable::forward>(x, training);
            },
            [decoder = decoder_](const at::Tensor& x, bool training) {
              return decoder.sync<&Decoder::forward>(x, training);
            }),
        sgd_({.lr = s.lr}, all_parameters()) {}

  Recurrent& recurrent() { return recurrent_; }
  double step(const at::Tensor& x, const at::Tensor& y, Recurrent::Hidden& hidden) {
    const muster::autograd::Context context;
    const at::Tensor loss = recurrent_.loss(x, y, hidden, true);
    muster::autograd::backward(context, {loss});
    sgd_.step(context);  // no zero_grad(): the gradients end with the context
    return loss.item<double>();
  }

 private:
  std::vector<muster::optim::ParameterRef> all_parameters() const {
    auto all = table_.sync<&EmbeddingTable::parameter_rrefs>();
    for (const auto& more :
         {muster::optim::parameter_rrefs(recurrent_.parameters()), decoder_.sync<&Decoder::parameter_rrefs>()})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  const muster::rpc::RRef<EmbeddingTable> table_;
  const muster::rpc::RRef<Decoder> decoder_;
  Recurrent recurrent_;
  muster::optim::DistributedOptimizer<muster::optim::SGD> sgd_;
};

// The same model in one process, with libtorch alone.
class LocalModel {
 public:
  explicit LocalModel(const ModelSizes& s)
      : table_(s.words, s.embedding, s.dropout, s.seed),
        decoder_(s.words, s.hidden, s.dropout, s.seed + 1),
        recurrent_(
            s, [this](const at::Tensor& x, bool training) { return table_.forward(x, training); },
            [this](const at::Tensor& x, bool training) { return decoder_.forward(x, training); }),
        sgd_(all_parameters(), torch::optim::SGDOptions(s.lr)) {}
  LocalModel(const LocalModel&) = delete;
  LocalModel& operator=(const LocalModel&) = delete;

  double step(const at::Tensor& x, const at::Tensor& y, Recurrent::Hidden& hidden) {
    sgd_.zero_grad();
    const at::Tensor loss = recurrent_.loss(x, y, hidden, true);
    loss.backward();
    sgd_.step();
    return loss.item<double>();
  }

 private:
  std::vector<at::Tensor> all_parameters() const {
    auto all = table_.parameters();
    for (const auto& more : {recurrent_.parameters(), decoder_.parameters()})
      all.insert(all.end(), more.begin(), more.end());
    return all;
  }

  EmbeddingTable table_;
  Decoder decoder_;
  Recurrent recurrent_;
  torch::optim::SGD sgd_;
};
