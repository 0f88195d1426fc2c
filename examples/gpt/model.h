// A language model as GPT-2's, over bytes: blocks of attention and a perceptron, each behind a normalisation. The table
// of the bytes' vectors is the last layer's weight as well.
#pragma once

#include <muster/parallel/activation_checkpoint.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

struct GptSizes {
  static constexpr int64_t kBytes = 256, kHeadWidth = 64;
  int64_t layers = 0, width = 0, length = 0;  // of the text that it sees

  // About so many parameters, in the proportions of GPT-2: a layer per 64 of width.
  static GptSizes of(double parameters, int64_t length) {
    GptSizes sizes{.length = length};
    sizes.layers = std::max<int64_t>(1, std::lround(std::cbrt(parameters / (12 * kHeadWidth * kHeadWidth))));
    const double width = std::sqrt(parameters / (12 * static_cast<double>(sizes.layers)));
    sizes.width = std::max<int64_t>(1, std::lround(width / kHeadWidth)) * kHeadWidth;
    return sizes;
  }
};

struct Block : torch::nn::Module {
  explicit Block(const GptSizes& sizes)
      : width(sizes.width),
        before_attention(register_module("before_attention", norm())),
        before_perceptron(register_module("before_perceptron", norm())),
        attention_in(register_module("attention_in", torch::nn::Linear(width, 3 * width))),
        attention_out(register_module("attention_out", torch::nn::Linear(width, width))),
        wide(register_module("wide", torch::nn::Linear(width, 4 * width))),
        narrow(register_module("narrow", torch::nn::Linear(4 * width, width))) {}

  // x and the result: [batch, length, width].
  torch::Tensor forward(const torch::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), heads = width / GptSizes::kHeadWidth;
    const auto parts = attention_in(before_attention(x)).view({batch, length, 3, heads, GptSizes::kHeadWidth});
    const auto of = [&](int64_t i) { return parts.select(2, i).transpose(1, 2); };  // [batch, heads, length, 64]
    const auto mixed = at::scaled_dot_product_attention(of(0), of(1), of(2), {}, 0.0, /*is_causal=*/true);
    const auto y = x + attention_out(mixed.transpose(1, 2).reshape({batch, length, width}));
    return y + narrow(torch::gelu(wide(before_perceptron(y))));
  }

  torch::nn::LayerNorm norm() const { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})); }

  int64_t width;
  torch::nn::LayerNorm before_attention, before_perceptron;
  torch::nn::Linear attention_in, attention_out, wide, narrow;
};

struct Gpt : torch::nn::Module {
  explicit Gpt(const GptSizes& its) : sizes(its) {
    for (int64_t i = 0; i < sizes.layers; ++i) blocks->push_back(std::make_shared<Block>(sizes));
    register_module("blocks", blocks);
    const torch::NoGradGuard no_grad;
    const double less = 1 / std::sqrt(2 * static_cast<double>(sizes.layers));  // each layer adds twice to its input
    for (auto& item : named_parameters()) {
      if (item.value().dim() < 2) continue;
      const bool adds = item.key().ends_with("attention_out.weight") || item.key().ends_with("narrow.weight");
      torch::nn::init::normal_(item.value(), 0, adds ? 0.02 * less : 0.02);
    }
  }

  // The logits [batch, length, 256] of the byte after each byte of `text` [batch, length].
  torch::Tensor logits(const torch::Tensor& text) {
    auto x = bytes(text) + places(torch::arange(text.size(1)));
    for (const auto& each : *blocks) {
      auto& block = *each->as<Block>();
      x = checkpointed ? muster::activation_checkpoint([&](const torch::Tensor& y) { return block.forward(y); }, x)
                       : block.forward(x);
    }
    return torch::nn::functional::linear(last(x), bytes->weight);
  }

  // The mean loss of each next byte in `text` [batch, length + 1].
  torch::Tensor forward(const torch::Tensor& text) {
    const int64_t length = text.size(1) - 1;
    const auto guess = logits(text.narrow(1, 0, length)).to(torch::kFloat);
    return torch::nn::functional::cross_entropy(guess.flatten(0, 1), text.narrow(1, 1, length).flatten());
  }

  GptSizes sizes;
  bool checkpointed = false;
  torch::nn::Embedding bytes = register_module("bytes", torch::nn::Embedding(GptSizes::kBytes, sizes.width)),
                       places = register_module("places", torch::nn::Embedding(sizes.length, sizes.width));
  torch::nn::ModuleList blocks;
  torch::nn::LayerNorm last = register_module("last", torch::nn::LayerNorm(torch::nn::LayerNormOptions({sizes.width})));
};
