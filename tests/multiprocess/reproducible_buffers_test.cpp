// DdpOptions::reproducible: each shard has buffers of its own, whatever their form is.
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "multiprocess/reproducible_layers.h"

namespace muster::test::batch_norms {
namespace {

// A buffer that a graph has kept, and that every shard writes before: its values are those of the shard, and the other
// shards' writing is no "modified by an inplace operation". A write of its own is.
TEST(Reproducible, BuffersThatAGraphKeepsBesideBatchNorms) {
  std::vector<Tensor> gradients;
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [&](World& world) {
      DistributedDataParallel<Layers> ddp(make_layers(), by_shards());
      const auto loss_of = [&](int shard, bool writes_again) {
        ddp->code.fill_(shard + 1);
        const Tensor y = ddp->a(Layers::input(shard)) * ddp->code;
        EXPECT_TRUE(torch::equal(ddp->code, torch::full({3}, shard + 1.)));
        const Tensor loss = ddp->narrow(y).pow(3).sum() + ddp->forward(shard);
        EXPECT_TRUE(torch::equal(ddp->code, torch::full({3}, shard + 1.)));
        if (writes_again) ddp->code.fill_(0);
        return loss;
      };
      EXPECT_THROW(ddp.backward_by_shards(0, [&](int shard) { return loss_of(shard, true); }), c10::Error);
      const Tensor kept = ddp->a->bias * ddp->code;  // before: a graph of the user's
      ddp.backward_by_shards(0, [&](int shard) { return loss_of(shard, false); });
      EXPECT_TRUE(torch::equal(ddp->code, torch::full({3}, 2.5)));
      EXPECT_THROW(kept.sum().backward(), c10::Error);
      if (world.rank() == 0) gradients.push_back(ddp->a->weight.grad().clone());
    });
  for (const Tensor& gradient : gradients) EXPECT_TRUE(torch::equal(gradient, gradients[0]));
}

// Buffers with gaps, conjugate ones, and two in one memory.
struct ManyForms : nn::Module {
  nn::Linear a = register_module("a", nn::Linear(4, 3));
  SyncBatchNorm norm{nullptr};
  Tensor gaps = register_buffer("gaps", torch::ones({2, 6}).slice(1, 0, 6, 2));
  Tensor conjugate = register_buffer("conjugate", torch::ones({3}, torch::kComplexFloat).conj());
  Tensor memory = torch::ones({6});
  Tensor whole = register_buffer("whole", memory), part = register_buffer("part", memory.slice(0, 2, 5));
  ManyForms() { norm = register_module("norm", SyncBatchNorm(nn::BatchNormOptions(3))); }
  void set(double value) {
    gaps.fill_(value);
    conjugate.fill_(c10::complex<double>(value, 2 * value));
    whole.fill_(value);
    part.fill_(-value);
  }
  void expect(double value) const {
    EXPECT_TRUE(torch::equal(gaps, torch::full({2, 3}, value)));
    EXPECT_TRUE(torch::equal(torch::view_as_real(conjugate.resolve_conj()),
                             torch::tensor({value, 2 * value}, torch::kFloat).expand({3, 2})));
    EXPECT_TRUE(torch::equal(whole, torch::tensor({value, value, -value, -value, -value, value}, torch::kFloat)));
    EXPECT_TRUE(torch::equal(part, torch::full({3}, -value)));
  }
};

TEST(Reproducible, BuffersOfManyFormsBesideBatchNorms) {
  for (const int ranks : {1, 2, 4})
    on_ranks(ranks, [](World&) {
      const auto net = std::make_shared<ManyForms>();
      DistributedDataParallel<ManyForms> ddp(net, by_shards());
      EXPECT_TRUE(net->conjugate.is_conj());
      EXPECT_EQ(net->gaps.stride(1), 2);
      ddp.backward_by_shards(0, [&](int shard) {
        net->set(shard + 1);
        const Tensor y = net->norm(net->a(Layers::input(shard)));
        net->expect(shard + 1);
        net->set(10 * (shard + 1));
        const Tensor z = net->norm(y.pow(3));
        net->expect(10 * (shard + 1));
        return z.pow(3).sum();
      });
      net->expect(25);  // the average
    });
}

// What a shard's function may not do to a buffer.
struct Change {
  const char* name;
  std::function<void(Tensor& buffer)> make;
};
const Change kChanges[] = {
    {"another size", [](Tensor& buffer) { buffer.resize_({6}); }},
    {"another memory", [](Tensor& buffer) { buffer.set_data(torch::ones({3})); }},
    {"another dtype", [](Tensor& buffer) { buffer.set_data(buffer.to(torch::kDouble)); }},
    {"another place", [](Tensor& buffer) { buffer.set_data(buffer.slice(0, 0, 2)); }},
};

template <typename Net>
void expect_changes_are_refused(int ranks, const std::function<Tensor(Net& net, int shard)>& loss) {
  on_ranks(ranks, [&](World& world) {
    const auto net = std::make_shared<Net>();
    DistributedDataParallel<Net> ddp(net, by_shards());
    const auto memory_of = [](const Tensor& buffer) { return buffer.storage().unsafeGetStorageImpl(); };
    const auto* const memory = memory_of(net->code);
    for (const Change& change : kChanges) {
      SCOPED_TRACE(text(ranks, " ranks, ", change.name));
      const int failing = 2 * ranks / kShards;  // the rank of shard 2
      expect_refusal(
          {world.rank() == failing ? "gave buffer code other memory, another shape or another dtype"
                                   : text("rank ", failing, " could not run the function of backward_by_shards()")},
          [&] {
            ddp.backward_by_shards(0, [&](int shard) {
              net->code.fill_(7);
              if (shard == 2) change.make(net->code);
              return loss(*net, shard);
            });
          });
      EXPECT_TRUE(torch::equal(net->code, torch::zeros({3})));
    }
    EXPECT_EQ(memory_of(net->code), memory);
    ddp.backward_by_shards(0, [&](int shard) {
      net->code.fill_(shard);
      return loss(*net, shard);
    });
    EXPECT_TRUE(torch::equal(net->code, torch::full({3}, 1.5)));
  });
}

TEST(Reproducible, ABufferKeepsItsMemory) {
  struct Ordinary : nn::Module {
    nn::Linear a = register_module("a", nn::Linear(4, 3));
    Tensor code = register_buffer("code", torch::zeros({3}));
  };
  for (const int ranks : {1, 2, 4}) {
    expect_changes_are_refused<Layers>(ranks, [](Layers& net, int shard) { return net.forward(shard); });
    expect_changes_are_refused<Ordinary>(
        ranks, [](Ordinary& net, int shard) { return net.a(Layers::input(shard)).pow(3).sum(); });
  }
}

// A function that fails by itself says why, also if it has changed a buffer's memory.
TEST(Reproducible, AFailureCountsMoreThanABuffersMemory) {
  on_ranks(1, [](World&) {
    DistributedDataParallel<Layers> ddp(make_layers(), by_shards());
    EXPECT_THROW(ddp.backward_by_shards(0,
                                        [&](int shard) -> Tensor {
                                          if (shard < 2) return ddp->forward(shard);
                                          ddp->code.set_data(torch::ones({5}));
                                          throw std::out_of_range("no data");
                                        }),
                 std::out_of_range);
    expect_usual_step(ddp);
  });
}

}  // namespace
}  // namespace muster::test::batch_norms
