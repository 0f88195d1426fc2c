// Communication hooks of DistributedDataParallel: what a hook sees, when its steps run, and how errors end. The hooks
// that are made already are in comm_hook_made_test.cpp.
#include <stdexcept>
#include <thread>

#include "multiprocess/comm_hook_fixture.h"

namespace muster::test::hook_tests {
namespace {

constexpr double kBytes = 1.0 / (1 << 20);
const DdpOptions kManyBuckets = {.bucket_cap_mb = 400 * kBytes, .first_bucket_cap_mb = 100 * kBytes};

TEST(CommHook, SeesEachBucketOnceInOrder) {
  on_ranks(2, [](World& world) {
    std::vector<size_t> seen;
    std::vector<std::string> names;
    const auto hook = [&](GradBucket& bucket) -> HookFuture {
      EXPECT_EQ(bucket.index(), seen.size());
      seen.push_back(bucket.index());
      EXPECT_EQ(bucket.is_last(), bucket.index() == 3);
      EXPECT_EQ(bucket.group().size(), 2);
      const auto gradients = bucket.gradients();
      EXPECT_EQ(gradients.size(), bucket.places().size());
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), bucket.places()[i].parameter.sizes());
        EXPECT_TRUE(gradients[i].is_alias_of(bucket.buffer()));
        names.push_back(bucket.places()[i].name);
        gradients[i].fill_(static_cast<double>(bucket.index()) + 1);
      }
      return bucket.buffer();
    };
    auto ddp = ddp_with(hook, torch::kFloat, kManyBuckets);
    for (int step = 0; step < 3; ++step) {
      seen.clear();
      names.clear();
      step_of(ddp, step, world);
      EXPECT_EQ(seen.size(), 4U);
      EXPECT_EQ(names.size(), 4U);
      const auto buckets = ddp.bucket_names();
      if (step == 0) continue;  // the order of the first step is not that of the others
      for (size_t b = 0; b < buckets.size(); ++b) EXPECT_EQ(buckets[b], std::vector<std::string>{names[b]});
      for (size_t b = 0; b < buckets.size(); ++b)
        EXPECT_EQ(ddp->named_parameters()[buckets[b][0]].grad().max().item<double>(), static_cast<double>(b) + 1);
    }
  });
}

TEST(CommHook, StepsThatCommunicateRunInOrderInTheThreadOfBackward) {
  on_ranks(3, [](World& world) {
    const auto here = std::this_thread::get_id();
    std::vector<std::string> events;
    const auto hook = [&](GradBucket& bucket) {
      const std::string name = text(bucket.index());
      events.push_back(name + " begins");
      const Tensor buffer = bucket.buffer();
      return HookFuture(all_reduce_async(buffer), buffer)
          .then([&, name](const Tensor& sum) -> HookFuture {
            EXPECT_EQ(std::this_thread::get_id(), here);
            events.push_back(name + " goes on");
            return {all_reduce_async(sum), sum};  // sums of sums
          })
          .then([&, name](const Tensor& sum) -> HookFuture {
            events.push_back(name + " and on");
            broadcast(sum, 1);
            return sum;
          })
          .then([&](const Tensor& sum) {
            EXPECT_EQ(std::this_thread::get_id(), here);
            return sum / 9;
          });
    };
    auto ddp = ddp_with(hook, torch::kDouble, kManyBuckets);
    auto plain = ddp_with(nullptr, torch::kDouble);
    for (int step = 0; step < 2; ++step) {
      events.clear();
      expect_close(step_of(ddp, step, world), step_of(plain, step, world), 1e-14);
      const std::vector<std::string> expected = {"0 begins",  "1 begins",  "0 goes on", "2 begins",
                                                 "0 and on",  "1 goes on", "3 begins",  "1 and on",
                                                 "2 goes on", "2 and on",  "3 goes on", "3 and on"};
      EXPECT_EQ(events, expected);
    }
  });
}

TEST(CommHook, AveragesAreThoseWithoutAHook) {
  for (const HostOfRank& hosts : {HostOfRank{"a", "a"}, HostOfRank{"a", "a", "b"}})
    on_hosts(hosts, [](World& world) {
      for (const DdpOptions& options : {DdpOptions(), kManyBuckets}) {
        auto plain = ddp_with(nullptr, torch::kFloat, options),
             ddp = ddp_with(hooks::all_reduce, torch::kFloat, options);
        for (int step = 0; step < 3; ++step) expect_same(step_of(ddp, step, world), step_of(plain, step, world));
      }
      auto own = ddp_with(hooks::noop);
      const auto gradients = step_of(own, 5, world);
      for (size_t i = 0; i < gradients.size(); ++i)
        EXPECT_TRUE(torch::equal(gradients[i], own->wanted(i, 5, world.rank(), world.world_size())));
    });
}

// A gradient of its own block on the heap, one with other strides, and one without elements.
TEST(CommHook, LargeAndUnusualGradients) {
  on_ranks(2, [](World& world) {
    const std::vector<Shape> shapes = {{513, 601}, {8, 6, 3, 3}, {0, 5}, {}, {20, 14}};
    const auto make = [&](const CommHook& hook) {
      auto net = std::make_shared<HookNet>(shapes);
      const torch::NoGradGuard no_grad;
      net->p[1].set_data(net->p[1].contiguous(at::MemoryFormat::ChannelsLast));
      net->p[4].set_data(torch::zeros({14, 20}).t());
      return HookDdp(net, hook);
    };
    auto plain = make(nullptr), all = make(hooks::all_reduce);
    auto exact = make(hooks::PowerSgd({.matrix_approximation_rank = 601, .start_iter = 0, .min_compression_rate = 0})),
         top = make(hooks::TopK({.ratio = 1}));
    for (int step = 0; step < 3; ++step) {
      const auto expected = step_of(plain, step, world);
      expect_same(step_of(all, step, world), expected);
      expect_close(step_of(exact, step, world), expected, 2e-4);
      expect_close(step_of(top, step, world), expected, 1e-6);
    }
  });
}

TEST(CommHook, AccumulationUnusedParametersAndExceptions) {
  on_ranks(2, [](World& world) {
    struct Partial : HookNet {
      Tensor forward(size_t used, bool throws = false) {
        Tensor sum = torch::zeros({});
        for (size_t i = 0; i < used; ++i) {
          sum = sum + (p[i] * wanted(i, 1, 0, 1)).sum();
          if (throws && i == 0)
            sum.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("a step that fails"); });
        }
        return sum;
      }
    };
    int calls = 0;
    const auto counted = [&](GradBucket& bucket) {
      ++calls;
      return hooks::all_reduce(bucket);
    };
    DistributedDataParallel<Partial> ddp(std::make_shared<Partial>());
    ddp.register_comm_hook(counted);
    {
      const auto guard = ddp.no_sync();
      ddp.forward(4).backward();
      EXPECT_EQ(calls, 0);
    }
    ddp.forward(4).backward();
    EXPECT_GT(calls, 0);
    EXPECT_TRUE(torch::allclose(ddp->p[0].grad(), 2 * ddp->wanted(0, 1, 0, 1)));
    ddp->zero_grad();
    const std::string what = message_of<InvalidArgument>([&] { ddp.forward(world.rank() == 0 ? 4 : 2).backward(); });
    EXPECT_CONTAINS(what, "p2, p3");
    EXPECT_TRUE(torch::allclose(ddp->p[3].grad(), ddp->wanted(3, 1, 0, 1) / 2));
    // One rank's backward() throws before it has the last gradient; it makes up for it, and the next step is good.
    ddp->zero_grad();
    if (world.rank() == 0)
      EXPECT_THROW(ddp.forward(4, true).backward(), std::runtime_error);
    else
      EXPECT_THROW(ddp.forward(4).backward(), InvalidArgument);
    ddp->zero_grad();
    ddp.forward(4).backward();
    EXPECT_TRUE(torch::allclose(ddp->p[1].grad(), ddp->wanted(1, 1, 0, 1)));
  });
}

HookFuture counted_in_state(std::shared_ptr<int>& state, GradBucket& bucket) {
  ++*state;
  return hooks::all_reduce(bucket);
}

TEST(CommHook, MayHaveAState) {
  on_ranks(1, [](World& world) {
    const auto calls = std::make_shared<int>(0);
    DistributedDataParallel<HookNet> ddp(std::make_shared<HookNet>());
    ddp.register_comm_hook(calls, &counted_in_state);
    step_of(ddp, 0, world);
    EXPECT_EQ(*calls, 1);
  });
}

// An error on all ranks costs the step, not the next one.
TEST(CommHook, AStepAfterAnError) {
  on_ranks(2, [](World& world) {
    int step = 0;
    std::vector<int> calls(4);
    const auto hook = [&](GradBucket& bucket) {
      ++calls[static_cast<size_t>(step)];
      const Tensor buffer = bucket.buffer();
      if (step == 0 && bucket.index() == 2) throw std::runtime_error("a hook that fails");
      return HookFuture(all_reduce_async(buffer, {.op = ReduceOp::AVG}), buffer)
          .then([&, index = bucket.index()](const Tensor& average) -> HookFuture {
            if (step == 1 && index == 1) throw std::runtime_error("a step that fails");
            return average;
          })
          .then([&](const Tensor& average) { return step == 2 ? average.narrow(0, 0, 1) : average; });
    };
    auto ddp = ddp_with(hook, torch::kFloat, kManyBuckets), plain = ddp_with(nullptr);
    EXPECT_THROW(step_of(ddp, 0, world), std::runtime_error);
    ddp.forward(0, world.rank(), 2);  // makes up for it
    step = 1;
    EXPECT_THROW(step_of(ddp, 1, world), std::runtime_error);
    ddp.forward(0, world.rank(), 2);
    step = 2;
    expect_refusal({"elements, got one of 1"}, [&] { step_of(ddp, 2, world); });
    step = 3;
    expect_same(step_of(ddp, 3, world), step_of(plain, 3, world));
    EXPECT_EQ(calls, (std::vector<int>{4, 4, 4, 4}));
  });
}

TEST(CommHook, BadUseIsOneSentence) {
  on_ranks(2, [](World& world) {
    auto none = ddp_with([](GradBucket&) { return HookFuture(Tensor()); });
    expect_refusal({"the communication hook, for the bucket that begins with parameter p", "elements, got no tensor"},
                   [&] { step_of(none, 0, world); });
    auto other = ddp_with([](GradBucket&) { return HookFuture(torch::zeros({3})); });
    expect_refusal({"the bucket that begins with parameter p", "elements, got one of 3"},
                   [&] { step_of(other, 0, world); });
    expect_refusal({"has a communication hook already"}, [&] { other.register_comm_hook(hooks::noop); });
    expect_refusal({"the communication hook is empty"}, [&] { ddp_with(nullptr).register_comm_hook(CommHook()); });
    expect_refusal({"set_buffer() gets a tensor"}, [&] {
      auto bad = ddp_with([](GradBucket& bucket) -> HookFuture {
        bucket.set_buffer(torch::zeros({2}));
        return bucket.buffer();
      });
      step_of(bad, 0, world);
    });
    expect_refusal({"matrix_approximation_rank: expected 1 or more, got 0"},
                   [] { hooks::PowerSgd({.matrix_approximation_rank = 0}); });
    expect_refusal({"ratio: expected a number above 0 and at most 1, got 0"}, [] { hooks::TopK({.ratio = 0}); });
    expect_refusal({"at most 1, got 1.5"}, [] { hooks::TopK({.ratio = 1.5}); });
    expect_refusal({"is empty"}, [] { hooks::fp16_compress_wrapper(nullptr); });
  });
}

}  // namespace
}  // namespace muster::test::hook_tests
