// An owner of parameters dies, or is stopped, while a DistributedOptimizer steps: step() says who it was and when it
// should, the others have stepped as a whole or not at all, and a training goes on over those that live.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_text.h"
#include "base/text.h"
#include "muster/autograd/context.h"
#include "muster/base/error.h"
#include "muster/optim/distributed_optimizer.h"
#include "muster/rpc/call.h"
#include "muster/rpc/rref.h"
#include "muster/rpc/worker.h"
#include "support/forked.h"
#include "support/led_job.h"
#include "support/nothing_left.h"
#include "support/patience.h"
#include "support/ranks.h"

namespace muster::test {
namespace {

using namespace std::chrono_literals;
using at::Tensor;
using optim::DistributedOptimizer;
using optim::ParameterRef;
using rpc::RRef;

constexpr int kWorkers = 4, kVictim = 2;  // worker 0 trains, and owns parameters as the others do

// Its loss has the gradients 1 and 2, so that after n steps at rate 1 without momentum all of `a` is -n, of `b` -2n.
class Weights {
 public:
  Tensor loss() { return a_.sum() + 2 * b_.sum(); }
  std::vector<ParameterRef> parameters() { return optim::parameter_rrefs({a_, b_}); }
  // How many steps it has taken; none: not as a whole.
  std::optional<int> steps() {
    const auto count = static_cast<int>(-a_[0].item<double>());
    const bool whole = (a_ == -count).all().item<bool>() && (b_ == -2 * count).all().item<bool>();
    return whole ? std::optional(count) : std::nullopt;
  }

 private:
  const Tensor a_ = at::zeros({1000}, at::kDouble).set_requires_grad(true);
  const Tensor b_ = at::zeros({50, 20}, at::kDouble).set_requires_grad(true);
};

// SGD that is killed in one worker while it steps there; the others' steps end after that one's death, or before.
struct Deadly {
  struct Options {
    double lr = 1;
    int in = -1, at_step = 0;
    bool others_later = false;
    MSGPACK_DEFINE(lr, in, at_step, others_later);
  };
  explicit Deadly(Options given) : options(given) {}
  void step(at::TensorList parameters, at::TensorList gradients) {
    const at::NoGradGuard no_grad;
    const bool now = ++steps == options.at_step;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (now && i == 1) meet();  // in the middle
      if (gradients[i].defined()) parameters[i].sub_(gradients[i], options.lr);
    }
  }
  void meet() const {
    const auto until = patience();
    World::current().store().add("in step", 1);
    if (rpc::worker_info().id == options.in)
      while (!until.passed()) std::this_thread::yield();  // to be killed
    if (!options.others_later) return;
    while (rpc::is_alive(options.in) && !until.passed()) std::this_thread::yield();
    const int me = rpc::worker_info().id;  // who is asked last takes longest
    for (int i = 0; i < 50 * me * me; ++i) rpc::sync<[] {}>(me);
  }
  double lr() const { return options.lr; }
  void set_lr(double lr) { options.lr = lr; }
  Options options;
  int steps = 0;
};

struct SpreadModel {
  SpreadModel() {
    for (int worker = 0; worker < kWorkers; ++worker) owners.push_back(rpc::remote<Weights>(worker));
  }
  Tensor loss() const {
    std::vector<rpc::Future<Tensor>> parts;
    for (const auto& owner : owners) parts.push_back(owner.async<&Weights::loss>());
    Tensor sum = at::zeros({}, at::kDouble);
    for (auto& part : parts) sum = sum + part.get();
    return sum;
  }
  std::vector<ParameterRef> parameters() const {
    std::vector<ParameterRef> all;
    for (const auto& owner : owners)
      for (auto& one : owner.sync<&Weights::parameters>()) all.push_back(std::move(one));
    return all;
  }
  void drop(int worker) {
    std::erase_if(owners, [&](const auto& one) { return one.owner().id == worker; });
  }
  // As all owners have taken them, each as a whole; -1: they differ.
  int steps() const {
    int same = owners[0].sync<&Weights::steps>().value_or(-1);
    for (const auto& owner : owners)
      if (owner.sync<&Weights::steps>() != same) same = -1;
    return same;
  }
  std::vector<RRef<Weights>> owners;
};

template <typename Optimizer>
void train(const SpreadModel& model, Optimizer& optimizer) {
  autograd::Context context;
  autograd::backward(context, {model.loss()});
  optimizer.step(context);
}

void nothing_is_left(const SpreadModel& model, size_t objects) {
  for (const auto& owner : model.owners) expect_nothing_left_on(owner.owner().id, objects);
}

// A job whose worker 0 runs `body`, which gives what it has to say. The others serve, until it is over.
class Training {
 public:
  Training(const rpc::Options& options, const std::function<std::string(const SharedNumbers&)>& body)
      : ranks_(kWorkers,
               [&](int rank) { return lead_or_serve(job_, rank, kWorkers, options, [&] { return body(numbers_); }); }) {
  }
  ForkedRanks& ranks() { return ranks_; }
  Store& store() { return *store_; }
  const SharedNumbers& numbers() const { return numbers_; }
  void wait_for(const std::string& key, int64_t count = 1) {
    const auto until = patience();
    while (store_->add(key, 0) < count && !until.passed()) std::this_thread::yield();
    EXPECT_FALSE(until.passed()) << key;
  }
  // What worker 0 said, when all have ended.
  std::string finish(bool victim_dies) {
    const auto end = ranks_.wait(0, patience());
    EXPECT_TRUE(end.exited && end.status == 0) << end.said;
    for (int rank = 1; rank < kWorkers; ++rank) {
      const auto other = ranks_.wait(rank, patience());
      if (rank == kVictim && victim_dies) {
        EXPECT_EQ(other.signal, SIGKILL);
      } else {
        EXPECT_TRUE(other.exited && other.status == 0) << "worker " << rank << ": " << other.said;
      }
    }
    return end.said;
  }

 private:
  const ForkedJob job_;
  const std::shared_ptr<Store> store_ = job_.store();
  const SharedNumbers numbers_{2};
  ForkedRanks ranks_;
};

// The others' steps are under way, or have ended, when the victim's is cut short.
void kill_in_step(const std::string& transport, bool others_later) {
  const auto before = leftovers();
  {
    Training training({.transport = transport}, [&](const SharedNumbers& numbers) -> std::string {
      SpreadModel model;
      std::string said = "no error";
      {
        DistributedOptimizer<Deadly> optimizer({.in = kVictim, .at_step = 3, .others_later = others_later},
                                               model.parameters());
        DistributedOptimizer<optim::Adam> adam({.lr = 0}, model.parameters());  // only counts
        train(model, optimizer);
        train(model, optimizer);
        train(model, adam);
        autograd::Context context;
        autograd::backward(context, {model.loss()});
        try {
          optimizer.step(context);
        } catch (const PeerLost& error) {
          said = error.what();
          EXPECT_EQ(error.rank(), kVictim);
        }
        model.drop(kVictim);
        EXPECT_EQ(model.steps(), 3);  // all others have, when the error comes
        // The optimizer still names the lost one, and still steps the others.
        autograd::Context next;
        autograd::backward(next, {model.loss()});
        EXPECT_THROW(optimizer.step(next), PeerLost);
        EXPECT_EQ(model.steps(), 4);
        // Until it is told to do without. What the others keep is still there.
        EXPECT_EQ(optimizer.drop_lost(), (std::vector<size_t>{4, 5}));
        EXPECT_EQ(optimizer.drop_lost(), std::vector<size_t>());
        train(model, optimizer);
        EXPECT_EQ(model.steps(), 5);
        EXPECT_THROW(adam.state(), PeerLost);
        adam.drop_lost();
        train(model, adam);
        auto state = adam.state();
        EXPECT_EQ(state.size(), 6u * 3);
        for (const size_t place : {0, 1, 2, 3, 6, 7}) EXPECT_EQ(state.at(text(place, ".step")).item<double>(), 2);
        state["4.step"] = state["7.step"] = at::tensor(5.0);  // 4: of the lost one
        adam.load_state(state);
        EXPECT_EQ(adam.state().at("7.step").item<double>(), 5);
      }
      {
        DistributedOptimizer<optim::SGD> optimizer({.lr = 1}, model.parameters());  // another one
        for (int i = 0; i < 3; ++i) train(model, optimizer);
        EXPECT_EQ(model.steps(), 8);
      }
      nothing_is_left(model, 1);
      return said;
    });
    training.wait_for("in step", kWorkers);
    const int pid = training.ranks().pid(kVictim);
    training.ranks().signal(kVictim, SIGKILL);
    EXPECT_CONTAINS(training.finish(true), text("worker2 (pid ", pid, ") "));
  }
  EXPECT_EQ(leftovers(), before);
}

TEST(RpcFaultProcess, AnOwnerIsKilledInItsStep) {
  kill_in_step("auto", false);
  kill_in_step("auto", true);
}
TEST(RpcFaultProcess, AnOwnerIsKilledInItsStepOverTcp) {
  kill_in_step("tcp", false);
  kill_in_step("tcp", true);
}

// Whatever is under way when it dies, forward, backward or step.
TEST(RpcFaultProcess, AnOwnerIsKilledAtAnyTimeOfATraining) {
  for (unsigned seed = 1; seed <= 4; ++seed) {
    Training training({}, [&](const SharedNumbers&) -> std::string {
      SpreadModel model;
      std::string said = "no error";
      int done = 0;
      try {
        DistributedOptimizer<optim::SGD> optimizer({.lr = 1}, model.parameters());
        for (const auto until = patience(); !until.passed(); ++done) {
          if (done == 5) World::current().store().add("warm", 1);
          train(model, optimizer);
        }
      } catch (const PeerLost& error) {
        said = error.what();
      } catch (const RemoteError& error) {
        said = error.what();
      }
      model.drop(kVictim);
      const int steps = model.steps();  // each of them: they had all been asked, or none
      EXPECT_TRUE(steps == done || steps == done + 1) << steps << " steps, " << done << " without an error";
      DistributedOptimizer<optim::SGD> optimizer({.lr = 1}, model.parameters());
      train(model, optimizer);
      EXPECT_EQ(model.steps(), steps + 1);
      return said;
    });
    training.wait_for("warm");
    std::mt19937 dice(seed);
    const auto until = Clock::now() + std::chrono::microseconds(dice() % 5000);
    while (Clock::now() < until) std::this_thread::yield();
    training.ranks().signal(kVictim, SIGKILL);
    EXPECT_CONTAINS(training.finish(true), text("worker2 (pid ", training.ranks().pid(kVictim), ") ")) << seed;
  }
}

// Returns when no thread of the process runs any more.
void stop_and_wait(int pid) {
  ::kill(pid, SIGSTOP);
  const auto until = patience();
  for (bool all = false; !all && !until.passed();) {
    all = true;
    for (const auto& thread : std::filesystem::directory_iterator(text("/proc/", pid, "/task"))) {
      const std::string line = text_of_file(thread.path() / "stat");
      const size_t name_end = line.rfind(')');
      all = all && name_end != std::string::npos && line[name_end + 2] == 'T';
    }
    std::this_thread::yield();
  }
  EXPECT_FALSE(until.passed());
}

// One that is stopped is not dead: step() ends at the time limit of calls. The call that it then finds has nobody who
// waits for it, and is not begun; it takes part in the next step.
TEST(RpcFaultProcess, AnOwnerIsStoppedBeforeItsStep) {
  Training training({.timeout = 5s}, [&](const SharedNumbers& numbers) -> std::string {
    SpreadModel model;
    DistributedOptimizer<optim::SGD> optimizer({.lr = 1}, model.parameters());
    train(model, optimizer);
    autograd::Context context;
    autograd::backward(context, {model.loss()});
    World::current().store().add("stop", 1);
    World::current().store().get("stopped", patience());
    std::string said = "no error";
    numbers[0] = now_ns();
    try {
      optimizer.step(context);
    } catch (const TimeoutError& error) {
      said = error.what();
    }
    numbers[1] = now_ns();
    World::current().store().add("go on", 1);
    const auto until = patience();
    while (!until.passed()) {
      try {
        EXPECT_EQ(model.owners[kVictim].sync<&Weights::steps>(), 1);
        break;
      } catch (const TimeoutError&) {
      }
    }
    EXPECT_EQ(model.owners[1].sync<&Weights::steps>(), 2);
    EXPECT_EQ(model.owners[3].sync<&Weights::steps>(), 2);
    train(model, optimizer);
    EXPECT_EQ(model.owners[kVictim].sync<&Weights::steps>(), 2);
    EXPECT_EQ(model.owners[3].sync<&Weights::steps>(), 3);
    return said;
  });
  training.wait_for("stop");
  stop_and_wait(training.ranks().pid(kVictim));
  training.store().set("stopped", "");
  training.wait_for("go on");
  training.ranks().signal(kVictim, SIGCONT);
  EXPECT_CONTAINS(training.finish(false), "worker2");
  const int64_t took = training.numbers()[1] - training.numbers()[0];
  EXPECT_GE(took, 4'900'000'000);
}

}  // namespace
}  // namespace muster::test
