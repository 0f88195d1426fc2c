// A worker dies in an outer step of meta-learning. Its tasks are done again on the others, the meta-gradient is the
// same to the last bit, and nothing is left on the workers that live.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/text.h"
#include "muster/autograd/context.h"
#include "muster/optim/meta.h"
#include "muster/remote/parallelize.h"
#include "muster/rpc/call.h"
#include "muster/rpc/worker.h"
#include "support/forked.h"
#include "support/led_job.h"
#include "support/nothing_left.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kTeam = 3;
constexpr int64_t kTasks = 7;

enum Moment { kNever, kInForward, kAfterForward, kInBackward };

struct Doom {
  int worker = -1, moment = kNever;
  MSGPACK_DEFINE(worker, moment);
  void strike(Moment now) const {
    if (worker == rpc::worker_info().id && moment == now) ::raise(SIGKILL);
  }
};

struct SmallNet : torch::nn::Module {
  torch::nn::Linear in{1, 5}, out{5, 1};
  SmallNet() {
    register_module("in", in);
    register_module("out", out);
  }
  Tensor loss(const Tensor& x, const Tensor& y) { return (out(in(x).tanh()) - y).square().mean(); }
};

Tensor adapted_unless_killed(optim::ModuleState model, Doom doom, Tensor task) {
  doom.strike(kInForward);
  SmallNet net;
  optim::recover_state_dict(net, model);
  optim::MetaAdam inner(net, {.lr = 0.05});
  for (int step = 0; step < 2; ++step) inner.step(net.loss(task[0], task[1]));
  const Tensor loss = net.loss(task[0] + 0.1, task[1]);
  loss.register_hook([doom](const Tensor& gradient) {
    doom.strike(kInBackward);
    return gradient;
  });
  return loss;
}

Tensor all_tasks() {
  const Tensor x = at::linspace(-1, 1, kTasks * 10).view({kTasks, 10, 1});
  return at::stack({x, (x * 3).sin()}, 1);
}

struct Job {
  std::string transport;
  bool balanced = false;
  int retries = 1;
};

Tensor loss_over_workers(SmallNet& net, const Job& job, const Doom& doom) {
  return remote_sync_call<&adapted_unless_killed>(
      optim::extract_state_dict(net), doom, all_tasks(),
      {.partitioner = dim_partitioner(0, {.exclusive = true, .keepdim = false, .balanced = job.balanced}),
       .reducer = mean_reducer,
       .max_retries = job.retries});
}

void kill_and_await(int worker) {
  ::kill(rpc::sync<[] { return static_cast<int>(::getpid()); }>(worker), SIGKILL);
  const auto until = patience();
  while (rpc::is_alive(worker) && !until.passed()) std::this_thread::yield();
}

template <typename Fn>
int rank_lost_in(Fn&& fn) {
  try {
    fn();
  } catch (const PeerLost& lost) {
    return lost.rank();
  }
  return -1;
}

// Worker 0 runs the body, the others serve.
void lead(const Job& job, const std::vector<int>& victims, const std::function<void()>& body) {
  const auto before = leftovers();
  {
    const ForkedJob forked;
    ForkedRanks ranks(kTeam, [&](int rank) {
      return lead_or_serve(forked, rank, kTeam, {.transport = job.transport}, [&] {
        body();
        return std::string();
      });
    });
    for (int rank = 0; rank < kTeam; ++rank) {
      const auto end = ranks.wait(rank, patience());
      if (std::find(victims.begin(), victims.end(), rank) != victims.end()) {
        EXPECT_EQ(end.signal, SIGKILL);
      } else {
        EXPECT_TRUE(end.exited && end.status == 0) << "worker " << rank << ": " << end.said;
      }
    }
  }
  EXPECT_EQ(leftovers(), before);
}

void expect_same_gradient(const Job& job, Moment moment) {
  SCOPED_TRACE(text(job.transport, job.balanced ? ", balanced" : "", ", moment ", static_cast<int>(moment)));
  lead(job, {1}, [&] {
    at::manual_seed(1);
    SmallNet net;
    const Tensors parameters = net.parameters();
    const Tensor undisturbed = loss_over_workers(net, job, {});
    const Tensors expected = torch::autograd::grad({undisturbed}, parameters);
    const auto expect_equal = [&](const Tensors& gradients) {
      for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(gradients[i].equal(expected[i])) << i;
    };

    Tensor loss = loss_over_workers(net, job, {.worker = 1, .moment = moment});
    if (moment == kAfterForward) kill_and_await(1);
    EXPECT_TRUE(loss.equal(undisturbed));
    expect_equal(torch::autograd::grad({loss}, parameters));
    EXPECT_FALSE(rpc::is_alive(1));
    EXPECT_THROW(loss.backward(), c10::Error);  // the graph is used up, as ever

    // The next step needs no retry: nothing is sent to the lost worker, if the call may choose.
    if (job.balanced) {
      const Job no_retries{.transport = job.transport, .balanced = true, .retries = 0};
      expect_equal(torch::autograd::grad({loss_over_workers(net, no_retries, {})}, parameters));
    }
    // The lost worker's tasks go elsewhere, in a context too.
    {
      const autograd::Context context;
      autograd::backward(context, {loss_over_workers(net, job, {})});
      Tensors of_context;
      for (const Tensor& one : parameters) of_context.push_back(context.gradient(one));
      expect_equal(of_context);
    }
    loss = Tensor();
    expect_nothing_left();
  });
}

TEST(RpcFaultProcess, ALostWorkersTasksAreDoneAgain) {
  for (const Moment moment : {kInForward, kAfterForward, kInBackward}) {
    expect_same_gradient({.transport = "auto"}, moment);
    expect_same_gradient({.transport = "auto", .balanced = true}, moment);
  }
}
TEST(RpcFaultProcess, ALostWorkersTasksAreDoneAgainOverTcp) {
  for (const Moment moment : {kInForward, kAfterForward, kInBackward})
    expect_same_gradient({.transport = "tcp"}, moment);
}

// Both others die, one in forward and one in backward: worker 0 does all tasks itself.
TEST(RpcFaultProcess, TheLastWorkerDoesAllTasks) {
  const Job job{.transport = "auto", .retries = 2};
  lead(job, {1, 2}, [&] {
    SmallNet net;
    const Tensors parameters = net.parameters();
    const Tensors expected = torch::autograd::grad({loss_over_workers(net, job, {})}, parameters);
    const Tensor loss = loss_over_workers(net, job, {.worker = 1, .moment = kInForward});
    kill_and_await(2);
    const Tensors gradients = torch::autograd::grad({loss}, parameters);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_TRUE(gradients[i].equal(expected[i])) << i;
    expect_nothing_left();
  });
}

int rank_unless_killed(Doom doom) {
  doom.strike(kInForward);
  return rpc::worker_info().id;
}

// A part that was for some workers is done again by one of these, not by a worker that only another part names.
TEST(RpcFaultProcess, APartKeepsItsOwnCandidates) {
  lead({.transport = "auto"}, {1}, [] {
    const auto parts = [](const Doom& doom) {
      std::vector<RemotePart<Doom>> all(6, {any_worker({1, 2}), {doom}});
      all.push_back({0, {Doom{}}});
      return all;
    };
    const std::vector<int> ranks = remote_sync_call<&rank_unless_killed>(Doom{.worker = 1, .moment = kInForward},
                                                                         {.partitioner = parts, .max_retries = 2});
    EXPECT_EQ(ranks, (std::vector<int>{2, 2, 2, 2, 2, 2, 0}));
  });
}

// What cannot be done again is the error that it is without retries, and says why.
TEST(RpcFaultProcess, SomeTasksCannotBeDoneAgain) {
  const Job job{.transport = "auto"};
  lead(job, {1}, [&] {
    SmallNet net;
    const Tensors parameters = net.parameters();
    const Tensor loss = loss_over_workers(net, job, {}),
                 without_retries = loss_over_workers(net, {"auto", false, 0}, {});
    kill_and_await(1);
    {
      const at::NoGradGuard no_grad;
      net.in->bias.add_(1);
    }
    const auto message = message_of<InvalidArgument>([&] { (void)torch::autograd::grad({loss}, parameters); });
    EXPECT_CONTAINS(message, "a tensor of the arguments was changed in place");
    EXPECT_EQ(rank_lost_in([&] { (void)torch::autograd::grad({without_retries}, parameters); }), 1);
    EXPECT_EQ(rank_lost_in([&] { loss_over_workers(net, {"auto", false, 0}, {}); }), 1);
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] { loss_over_workers(net, {"auto", false, -1}, {}); }), "got -1");
  });
}

}  // namespace
}  // namespace muster::test
