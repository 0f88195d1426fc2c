#include "muster/remote/team.h"

#include <ATen/ThreadLocalState.h>

#include <algorithm>
#include <deque>
#include <map>
#include <typeinfo>

#include "autograd/context.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "rpc/agent.h"

namespace muster::detail {
namespace {

constexpr int kAhead = 2;  // unanswered parts of one worker: it does one while the next is on its way

class TeamOfCall final : public Team {
 public:
  TeamOfCall(rpc::Agent& agent, std::vector<int> workers)
      : agent_(agent.weak_from_this()), waits_(agent.waits()), workers_(std::move(workers)) {
    if (workers_.empty())
      for (const auto& worker : agent.workers()) workers_.push_back(worker.id);
  }

  void give(std::optional<int> worker, Start part) override {
    {
      const std::lock_guard lock(mutex_);
      if (worker) {
        ++unanswered_[*worker];
      } else {
        waiting_.push_back(std::move(part));
      }
    }
    if (worker) {
      start(part, *worker);
    } else {
      start_those_that_wait();
    }
  }

  void over(int worker) override {
    {
      const std::lock_guard lock(mutex_);
      --unanswered_[worker];
    }
    start_those_that_wait();
  }

  rpc::Waits* waits() const override { return waits_; }

 private:
  void start(const Start& part, int worker) const {
    const rpc::detail::CallContext::Scope call(call_);
    const at::ThreadLocalStateGuard guard(state_);
    const autograd::Context::Scope context(context_);
    part(worker);
  }

  void start_those_that_wait() {
    for (;;) {
      Start part;
      int worker = 0;
      {
        const std::lock_guard lock(mutex_);
        const auto free = waiting_.empty() ? std::nullopt : free_worker();
        if (!free) return;
        worker = *free;
        ++unanswered_[worker];
        part = std::move(waiting_.front());
        waiting_.pop_front();
      }
      start(part, worker);
    }
  }

  std::optional<int> free_worker() {
    const auto agent = agent_.lock();
    if (!agent) return workers_.front();  // the call says why it cannot be made
    std::vector<int> living;
    for (const int one : workers_)
      if (agent->is_alive(one)) living.push_back(one);
    if (living.empty())
      for (const auto& one : agent->workers())
        if (agent->is_alive(one.id)) living.push_back(one.id);
    const auto least =
        std::min_element(living.begin(), living.end(), [&](int a, int b) { return unanswered_[a] < unanswered_[b]; });
    return unanswered_[*least] < kAhead ? std::optional(*least) : std::nullopt;
  }

  const std::weak_ptr<rpc::Agent> agent_;
  rpc::Waits* const waits_;
  std::vector<int> workers_;
  const rpc::detail::CallContext call_ = rpc::detail::CallContext::here();
  const at::ThreadLocalState state_;
  const std::shared_ptr<autograd::ContextState> context_ = autograd::current_context();
  std::mutex mutex_;
  std::map<int, int> unanswered_;  // parts of each worker
  std::deque<Start> waiting_;
};

constexpr const char* kChanged =
    "the call cannot be done again, because a tensor of its arguments was changed in place";

}  // namespace

std::shared_ptr<Team> Team::make(std::vector<int> workers) {
  return std::make_shared<TeamOfCall>(*rpc::current_agent(), std::move(workers));
}

std::vector<int64_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& one : tensors) versions.push_back(one.defined() && !one.is_inference() ? one._version() : 0);
  return versions;
}

bool is_loss_of(int worker, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerLost& lost) {
    return lost.rank() == worker;
  } catch (...) {
    return false;
  }
}

std::exception_ptr changed_since(const std::exception_ptr& loss) {
  const std::string advice = "Change the parameters after backward(), or without max_retries";
  try {
    if (loss) std::rethrow_exception(loss);
  } catch (const PeerLost& lost) {
    return std::make_exception_ptr(PeerLost(lost.rank(), lost.pid(), text(lost.message(), "; ", kChanged), advice));
  } catch (...) {
  }
  return std::make_exception_ptr(InvalidArgument(text("a worker was lost, and ", kChanged), advice));
}

}  // namespace muster::detail
