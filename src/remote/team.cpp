#include "muster/remote/team.h"

#include <ATen/ThreadLocalState.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <set>

#include "autograd/passes/context.h"
#include "muster/base/error.h"
#include "muster/remote/remote_call.h"
#include "rpc/agent/agent.h"

namespace muster::detail {
namespace {

constexpr int kAhead = 2;  // unanswered parts of one worker: it does one while the next is on its way

std::vector<int> without_repetitions(const std::vector<int>& all) {
  std::vector<int> once;
  std::set<int> seen;
  for (const int one : all)
    if (seen.insert(one).second) once.push_back(one);
  return once;
}

std::vector<int> ranks_of(const rpc::Agent& agent) {
  std::vector<int> all;
  for (const auto& worker : agent.workers()) all.push_back(worker.id);
  return all;
}

class TeamOfCall final : public Team, public std::enable_shared_from_this<TeamOfCall> {
 public:
  TeamOfCall(rpc::Agent& agent, const std::vector<int>& named)
      : agent_(agent.weak_from_this()),
        waits_(agent.waits()),
        all_(std::make_shared<const std::vector<int>>(ranks_of(agent))),
        named_(named.empty() ? all_ : std::make_shared<const std::vector<int>>(without_repetitions(named))) {}

  void give_to(int worker, Start part) override {
    {
      const std::lock_guard lock(mutex_);
      ++unanswered_[worker];
    }
    start(part, worker);
  }
  void give_to_any(Workers among, Start part) override {
    wait_for_worker({std::move(part), among ? std::move(among) : all_, false});
  }
  void give_again(Workers among, Start part) override {
    wait_for_worker({std::move(part), among ? std::move(among) : named_, true});
  }
  void over(int worker) override {
    {
      const std::lock_guard lock(mutex_);
      --unanswered_[worker];
    }
    start_those_that_wait();
  }
  Workers all() const override { return all_; }
  rpc::Waits* waits() const override { return waits_; }

 private:
  struct Waiting {
    Start part;
    Workers among;
    bool again;
  };

  void wait_for_worker(Waiting part) {
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(part));
    }
    start_those_that_wait();
  }

  // Several threads may start parts: a call may wait long for room on the way to its worker. Within that wait, this
  // thread may take answers to other parts, which make other workers free: then a thread of the pool goes on.
  void start_those_that_wait() {
    thread_local const TeamOfCall* starting = nullptr;
    thread_local bool hands_over = false;
    if (starting == this) {
      const auto agent = agent_.lock();
      if (!agent || std::exchange(hands_over, true)) return;  // without a pool, run() would come here again
      agent->run([self = shared_from_this()] { self->start_those_that_wait(); });
      hands_over = false;
      return;
    }
    const auto outer = std::exchange(starting, this);
    for (;;) {
      std::unique_lock lock(mutex_);
      auto next = take_next();
      lock.unlock();
      if (!next) break;
      start(next->first, next->second);
    }
    starting = outer;
  }

  // The first part that a worker has time for.
  std::optional<std::pair<Start, int>> take_next() {
    const std::vector<int>* busy = nullptr;  // most parts wait for the same workers
    for (auto part = waiting_.begin(); part != waiting_.end(); ++part) {
      if (part->among.get() == busy) continue;
      const auto worker = free_one(*part);
      if (worker) {
        ++unanswered_[*worker];
        std::pair<Start, int> next(std::move(part->part), *worker);
        waiting_.erase(part);
        return next;
      }
      busy = part->among.get();
    }
    return {};
  }

  std::optional<int> free_one(const Waiting& part) {
    const auto agent = agent_.lock();
    if (!agent) return part.among->front();  // the call says why it cannot be made
    const auto living = [&](const std::vector<int>& of) {
      std::vector<int> result;
      for (const int one : of)
        if (agent->is_alive(one)) result.push_back(one);
      return result;
    };
    std::vector<int> free = living(*part.among);
    if (free.empty() && part.again) free = living(*all_);
    if (free.empty()) return part.among->front();  // the call says that it is lost
    std::rotate(free.begin(), free.begin() + static_cast<ptrdiff_t>(next_first_++ % free.size()), free.end());
    const int least =
        *std::min_element(free.begin(), free.end(), [&](int a, int b) { return unanswered_[a] < unanswered_[b]; });
    return unanswered_[least] < kAhead ? std::optional(least) : std::nullopt;
  }

  void start(const Start& part, int worker) const {
    const rpc::detail::CallContext::Scope call({.call = call_.lock(), .grad_mode = at::GradMode::is_enabled()});
    const at::ThreadLocalStateGuard guard(state_);
    const autograd::Context::Scope context(context_);
    part(worker);
  }

  // Where calls of one part each go next: each in its turn.
  static inline std::atomic<size_t> next_first_{0};

  const std::weak_ptr<rpc::Agent> agent_;
  rpc::Waits* const waits_;
  const Workers all_, named_;
  const std::weak_ptr<void> call_ = rpc::detail::current_call();  // a handler's, which holds the agent
  const at::ThreadLocalState state_;
  const std::shared_ptr<autograd::ContextState> context_ = autograd::current_context();
  std::mutex mutex_;
  std::map<int, int> unanswered_;  // parts of each worker
  std::deque<Waiting> waiting_;
};

}  // namespace

std::shared_ptr<Team> Team::make(std::vector<int> named) {
  return std::make_shared<TeamOfCall>(*rpc::current_agent(), named);
}

Team::Workers candidates(const WorkerId& worker, const Team::Workers& like) {
  const auto* const among = worker.among();
  if (!among || among->empty()) return nullptr;
  std::vector<int> ranks;
  for (const WorkerId& one : *among) ranks.push_back(one.to().rank());
  return like && *like == ranks ? like : std::make_shared<const std::vector<int>>(std::move(ranks));
}

std::vector<PartTensors::Seen> PartTensors::seen_in(const rpc::Payload& payload) {
  std::vector<Seen> seen;
  for (const at::Tensor& one : payload.tensors)
    if (one.defined())
      seen.push_back({.version = one.is_inference() ? 0 : one._version(),
                      .storage = one.has_storage() ? one.storage().unsafeGetStorageImpl() : nullptr,
                      .sizes = one.sizes().vec()});
  return seen;
}

PartTensors::PartTensors(rpc::Payload& payload, bool keep) {
  if (keep) {
    for (at::Tensor& one : payload.tensors) {
      if (!one.defined()) continue;
      at::Tensor alias = one.detach();
      if (one.requires_grad())
        torch::autograd::impl::set_gradient_edge(alias, torch::autograd::impl::gradient_edge(one));
      one = std::move(alias);
    }
  }
  seen_ = seen_in(payload);
}

void PartTensors::check_unchanged(const rpc::Payload& payload) const {
  if (seen_in(payload) == seen_) return;
  throw InvalidArgument(
      "a tensor of the arguments was changed in place before the part was sent to a worker that had time, or again in "
      "place of a lost one",
      "Change tensors after the call's results are there; with max_retries, after backward().");
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

}  // namespace muster::detail
