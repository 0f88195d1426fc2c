// Where the gradients of DistributedDataParallel live: on the heap, in blocks that later steps use again; and when it
// replaces the process's allocator.
#include <c10/core/CPUAllocator.h>
#include <torch/optim/sgd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <set>
#include <thread>

#include "base/text.h"
#include "multiprocess/ddp_fixture.h"
#include "support/patience.h"

namespace muster::test::ddp_replicas {
namespace {

TEST_F(DdpTest, GradientsLiveOnTheHeapAndBucketsFollowTheOrderOfReadiness) {
  // b is registered first but used last: the first guess at the order is wrong.
  struct Crossed : torch::nn::Module {
    torch::nn::Linear last = register_module("last", torch::nn::Linear(6, 6)),
                      first = register_module("first", torch::nn::Linear(6, 6));
    torch::Tensor forward(torch::Tensor x) { return last(torch::relu(first(x))); }
  };
  run_threads(2, [](World& world) {
    auto net = make<Crossed>(1);
    DistributedDataParallel ddp(net, {.bucket_cap_mb = 64 * kByte, .first_bucket_cap_mb = 64 * kByte});
    const auto names = [&] {
      std::vector<std::string> flat;
      for (const auto& bucket : ddp.bucket_names()) flat.insert(flat.end(), bucket.begin(), bucket.end());
      return flat;
    };
    EXPECT_EQ(names().front(), "first.bias");  // the module's order, backwards
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(torch::ones({2, 6})).sum().backward();
      for (const auto& parameter : net->parameters())
        EXPECT_TRUE(world.heap().contains(parameter.grad().const_data_ptr()));
    }
    EXPECT_EQ(names().front().substr(0, 4), "last");
    EXPECT_EQ(names().back().substr(0, 5), "first");
  });
}

// Buckets in the order of readiness take the memory of those in the order of the module.
TEST_F(DdpTest, BucketsInAnotherOrderTakeNoMoreMemory) {
  struct Many : torch::nn::Module {
    Many() {
      for (int i = 0; i < 40; ++i)
        layers.push_back(register_module(text("layer", i), torch::nn::Linear(400, 400)));  // 25 MiB
    }
    torch::Tensor forward(torch::Tensor x) {
      for (size_t i = layers.size(); i-- > 0;) x = torch::tanh(layers[i](x));
      return x;
    }
    std::vector<torch::nn::Linear> layers;
  };
  run_threads(2, [](World& world) {
    const auto net = make<Many>(1);
    DistributedDataParallel ddp(net, {.bucket_cap_mb = 5});
    const auto before = ddp.bucket_names();
    const size_t used = world.heap().used(), committed = world.heap().committed();
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      ddp(torch::ones({2, 400})).sum().backward();
      EXPECT_NEAR(static_cast<double>(world.heap().used()), static_cast<double>(used), 1 << 16);
    }
    EXPECT_NE(ddp.bucket_names(), before);
    EXPECT_LE(world.heap().committed(), committed + (6 << 20));  // a bucket of another size, at most
  });
}

// The first layout is {c}, {large}, {b, a}; the order of readiness is b, large, a, c, so the second is {b}, {large},
// {a, c}. The buckets of the first leave two holes in a full heap, and {a, c} fits into neither beside {b}.
TEST_F(DdpTest, AFullHeapWhileBucketsAreLaidOutAnewIsAClearError) {
  struct Full : torch::nn::Module {
    torch::Tensor a = register_parameter("a", torch::ones({230'000})),
                  large = register_parameter("large", torch::ones({500'000})),
                  b = register_parameter("b", torch::ones({230'000})),
                  c = register_parameter("c", torch::ones({80'000}));
    torch::Tensor forward(torch::Tensor x) {
      for (const auto& used : {c, a, large, b}) x = x * used.sum() / used.numel();
      return x;
    }
  };
  WorldOptions options;
  options.heap_capacity = 16 << 20;
  run_threads(
      1,
      [](World& world) {
        const auto net = make<Full>(1);
        DistributedDataParallel ddp(net, {.first_bucket_cap_mb = 1});
        ASSERT_EQ(ddp.bucket_names(), (std::vector<std::vector<std::string>>{{"c"}, {"large"}, {"b", "a"}}));
        const auto backward = [&] { ddp(torch::ones({})).backward(); };
        std::vector<torch::Tensor> others;
        for (int64_t bytes = 1 << 20; bytes >= 64;) try {
            others.push_back(world.heap().empty({bytes}, torch::kByte));
          } catch (const Unavailable&) {
            bytes /= 2;
          }
        EXPECT_CONTAINS(message_of<Unavailable>(backward), "heap_capacity");
        others.clear();
        EXPECT_FLOAT_EQ(net->b.grad().sum().item<float>(), 1) << "the averages of the step";
        EXPECT_CONTAINS(message_of<Unavailable>(backward), "DistributedDataParallel has no buckets for gradients");
      },
      options);
}

// Gradients of a megabyte and more: two of one shape (either may take the other's block), one in another layout, one
// that a step does not use, and a user who keeps old gradients.
TEST_F(DdpTest, LargeGradientsAreBornOnTheHeap) {
  struct Large : torch::nn::Module {
    torch::nn::Linear a = register_module("a", torch::nn::Linear(12, 600)),
                      b = register_module("b", torch::nn::Linear(600, 600)),
                      c = register_module("c", torch::nn::Linear(600, 600));
    torch::Tensor d = register_parameter("d", torch::randn({500, 600}).div_(30).t().detach());  // not contiguous
    torch::Tensor idle = register_parameter("idle", torch::zeros({1 << 18}));
    torch::Tensor forward(torch::Tensor x, bool use_idle) {
      x = torch::mm(c(torch::relu(b(torch::relu(a(x))))), d);
      return use_idle ? x + idle.mean() : x;
    }
  };
  for (const int n : {1, 2, 3}) {
    SCOPED_TRACE(n);
    run_threads(n, [n](World& world) {
      const auto net = make<Large>(7), reference = make<Large>(7);
      DistributedDataParallel ddp(net, {.find_unused_parameters = true});
      EXPECT_EQ(ddp.bucket_names().size(), 5u);
      torch::optim::SGD optimizer(net->parameters(), 0.01), reference_optimizer(reference->parameters(), 0.01);
      int born = 0;  // what autograd computes, before DDP has touched it
      const void* birthplace = nullptr;
      net->b->weight.register_hook([&](const torch::Tensor& grad) {
        if (!world.heap().contains(grad.const_data_ptr())) return;
        ++born;
        if (!net->b->weight.grad().defined()) birthplace = grad.const_data_ptr();
      });
      std::set<const void*> places;
      size_t used = 0;
      std::vector<torch::Tensor> kept, copies;
      for (int step = 0; step < 9; ++step) {
        SCOPED_TRACE(step);
        const bool use_idle = step % 3 != 1;
        birthplace = nullptr;
        optimizer.zero_grad(/*set_to_none=*/step % 4 != 3);
        if (step % 4 == 2) {  // half of the gradient comes without communication
          const auto no_sync = ddp.no_sync();
          (ddp(part(world.rank(), 100 + step), use_idle).square().mean()).backward();
        }
        ddp(part(world.rank(), step), use_idle).square().mean().backward();
        reference_optimizer.zero_grad();
        for (int r = 0; r < n; ++r) {
          if (step % 4 == 2) (reference->forward(part(r, 100 + step), use_idle).square().mean() / n).backward();
          (reference->forward(part(r, step), use_idle).square().mean() / n).backward();
        }
        for (const auto& item : net->named_parameters()) {
          const auto& expected = reference->named_parameters()[item.key()].grad();
          const auto& ours = item.value().grad();
          ASSERT_EQ(ours.defined() && ours.count_nonzero().item<int64_t>() != 0,
                    expected.defined() && expected.count_nonzero().item<int64_t>() != 0)
              << item.key();
          if (!ours.defined()) continue;
          EXPECT_TRUE(world.heap().contains(ours.const_data_ptr())) << item.key();
          EXPECT_EQ(ours.strides(), item.value().strides()) << item.key();
          expect_equal_on_all_ranks(ours, world);
          const bool same = !expected.defined() || torch::allclose(ours, expected, 1e-4, 1e-6);
          EXPECT_TRUE(same) << item.key();
        }
        if (birthplace) {
          EXPECT_EQ(net->b->weight.grad().const_data_ptr(), birthplace) << "copied";
        }
        for (size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(torch::equal(kept[i], copies[i])) << "an old gradient";
        places.insert(net->b->weight.grad().const_data_ptr());
        places.insert(net->c->weight.grad().const_data_ptr());
        if (step == 1) used = world.heap().used();
        if (step == 4) {
          EXPECT_EQ(places.size(), 2u) << "gradients of later steps take the blocks of earlier ones";
          EXPECT_EQ(world.heap().used(), used);
          kept = {net->b->weight.grad(), net->d.grad()};
          copies = {kept[0].clone(), kept[1].clone()};
        }
        optimizer.step();
        reference_optimizer.step();
        if (step == 4) optimizer.zero_grad();  // so that the next step's gradients are new tensors
      }
      EXPECT_GE(born, 5);
    });
  }
}

// The gradient of the sum is that of both sides: what pos is given is a view of what the first layer has yet to read.
TEST_F(DdpTest, GradientsThatBackwardHasYetToReadAreNotReducedInPlace) {
  struct Positions : torch::nn::Module {
    torch::nn::Linear first = register_module("first", torch::nn::Linear(12, 512));
    torch::Tensor pos = register_parameter("pos", torch::randn({512, 512}));  // a megabyte, and all that is one
    torch::nn::Linear second = register_module("second", torch::nn::Linear(512, 8)),
                      third = register_module("third", torch::nn::Linear(8, 4));
    std::function<void(const torch::Tensor&)> before_first = [](const torch::Tensor&) {};
    torch::Tensor forward(torch::Tensor x) {
      const auto h = first(x);
      h.register_hook([this](const torch::Tensor& grad) { before_first(grad); });
      return third(torch::relu(second(h + pos.unsqueeze(0))));
    }
  };
  run_threads(2, [](World& world) {
    const auto net = make<Positions>(7), reference = make<Positions>(7);
    DistributedDataParallel ddp(net);
    EXPECT_EQ(ddp.bucket_names().front(), std::vector<std::string>{"pos"});
    const auto input = [](int rank, int step) { return part(rank, step, 512).unsqueeze(0); };
    const void* given = nullptr;
    net->pos.register_hook([&](const torch::Tensor& grad) { given = grad.const_data_ptr(); });
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      net->zero_grad();
      reference->zero_grad();
      bool shared = false;
      const auto before = world.group().stats().operations;
      // Backward stands between the two that the gradient is for, until the average is there. The first backward()
      // averages at its end.
      net->before_first = [&, step](const torch::Tensor& grad) {
        shared = grad.const_data_ptr() == given;
        const auto deadline = test::patience();
        while (step > 0 && world.group().stats().operations == before && !deadline.passed()) std::this_thread::yield();
      };
      ddp(input(world.rank(), step)).square().mean().backward();
      EXPECT_TRUE(shared) << "this test is for another libtorch";
      EXPECT_TRUE(world.heap().contains(given));
      EXPECT_NE(net->pos.grad().const_data_ptr(), given);
      for (int r = 0; r < 2; ++r) (reference->forward(input(r, step)).square().mean() / 2).backward();
      const auto ours = gradients(*net), expected = gradients(*reference);
      for (size_t i = 0; i < ours.size(); ++i) {
        EXPECT_TRUE(torch::allclose(ours[i], expected[i], 1e-4, 1e-6)) << i;
        expect_equal_on_all_ranks(ours[i], world);
      }
    }
  });
}

struct Large : torch::nn::Module {
  torch::nn::Linear first = register_module("first", torch::nn::Linear(600, 600)),
                    second = register_module("second", torch::nn::Linear(600, 2));
  torch::Tensor forward(torch::Tensor x) { return second(torch::relu(first(x))); }
};

// Three steps. Returns how many gradients autograd computed where they are reduced.
int train_large(World& world, DdpOptions options) {
  const auto net = make<Large>(7), alone = make<Large>(7);
  DistributedDataParallel ddp(net, options);
  int born = 0;
  net->first->weight.register_hook(
      [&](const torch::Tensor& grad) { born += world.heap().contains(grad.const_data_ptr()); });
  const auto input = [](int rank, int step) { return part(rank, step, 50).flatten().view({1, 600}); };
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    alone->zero_grad();
    ddp(input(world.rank(), step)).square().sum().backward();
    for (int r = 0; r < 2; ++r) (alone->forward(input(r, step)).square().sum() / 2).backward();
    EXPECT_TRUE(world.heap().contains(net->first->weight.grad().const_data_ptr()));
    EXPECT_TRUE(torch::allclose(net->first->weight.grad(), alone->first->weight.grad(), 1e-4, 1e-5)) << step;
  }
  return born;
}

// ctest runs each in a process of its own (EACH), because nothing takes away the allocator that DDP has installed.
TEST(DdpAllocator, IsReplacedOnlyOnRequest) {
  at::set_num_threads(1);
  c10::Allocator* const before = c10::GetCPUAllocator();
  if (before != c10::GetDefaultCPUAllocator()) GTEST_SKIP() << "an earlier test of this process has had it replaced";
  for (const bool replace : {false, true}) {
    SCOPED_TRACE(replace);
    run_threads(
        2, [replace](World& world) { EXPECT_EQ(train_large(world, {.replace_allocator = replace}) > 0, replace); });
    EXPECT_EQ(c10::GetCPUAllocator() != before, replace);
  }
}

// One that counts. It asks the one before it, or knows none.
class Others final : public c10::Allocator {
 public:
  explicit Others(c10::Allocator* before) : before_(before) {}
  c10::DataPtr allocate(size_t bytes) override {
    ++allocations;
    if (before_) return before_->allocate(bytes);
    void* const data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return before_ ? before_->raw_deleter() : &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  std::atomic<int> allocations{0};

 private:
  c10::Allocator* const before_;
};

// Somebody replaces DDP's allocator, while tensors of both are there.
TEST(DdpAllocator, IsReplacedByAnotherLater) {
  at::set_num_threads(1);
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) GTEST_SKIP() << "an earlier test has had it replaced";
  run_threads(2, [](World& world) { EXPECT_GT(train_large(world, {}), 0); });
  c10::Allocator* const ours = c10::GetCPUAllocator();
  for (c10::Allocator* const asked : {ours, static_cast<c10::Allocator*>(nullptr)}) {
    SCOPED_TRACE(asked ? "it asks DDP's" : "it knows no other");
    const torch::Tensor old = torch::ones({1000, 1000});
    static std::vector<std::unique_ptr<Others>> all;  // tensors may outlive the test
    Others& others = *all.emplace_back(std::make_unique<Others>(asked));
    c10::SetCPUAllocator(&others);
    run_threads(2, [&](World& world) {
      const int born = train_large(world, {});
      if (asked) {
        EXPECT_GT(born, 0);
      } else {
        EXPECT_EQ(born, 0);  // gradients are copied to where they are reduced
      }
    });
    EXPECT_GT(others.allocations, 0);
    EXPECT_EQ(old.sum().item<float>(), 1e6f);
    c10::SetCPUAllocator(ours);
  }
}

}  // namespace
}  // namespace muster::test::ddp_replicas
