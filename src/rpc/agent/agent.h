// Agent: a worker's side of remote calls. It belongs to a World (worker.h makes and ends it).
//
//   call()  ─ Header, arguments ─────────────────────────────────> on_message(): decodes, in the order of arrival
//     the pending call waits in a table                            the executor runs the handler, in any order
//   on_message(): the pending call gets its result <──────────────  reply, or error
//
// Each call ends exactly once, by whatever comes first: reply, error, deadline (tick()), cancellation, loss of the
// worker, end of the agent. What comes later finds no pending call and is dropped. A call that its caller has given up
// (deadline, cancellation) is still answered in its turn: by an error if it has not begun by then.
//
// Push-back: a thread that makes more calls to one worker than Options allow waits in call(), not in the executor's or
// the transport's threads. A call counts until it is answered, even if its caller has given it up. So a worker has at
// most max_calls requests and max_call_bytes of each other worker in memory; requests that were given up before they
// began are kept without their arguments.
//
// When a worker is lost, its calls here are cancelled (this_call.h), the calls of this worker to it fail, what it held
// here is released (object_table.h), and all other workers are told that its last message has been read (kDrained).
//
// A graceful shutdown goes in rounds, and works even while handlers still make calls. In each round a worker waits
// until it is idle (no call of its own under way, no handler queued, running or suspended) and tells all others how
// many calls it has made so far (kIdle). A round begins after all reports of the round before. If the sum over all
// workers is the same in two successive rounds, nobody has made a call since a moment at which all were idle, and the
// job is over. See F. Mattern, "Algorithms for distributed termination detection", 1987.
//
// Lifetime: futures and references outlive an agent; they reach it through Proxy and weak pointers, and find it closed.
// close() ends the threads; the last owner of the agent frees its memory.
//
// Thread-safety: all methods; close() must be called from outside of the pool.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/fork_count.h"
#include "comm/world/world_parts.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "muster/rpc/function.h"
#include "muster/rpc/future.h"
#include "muster/rpc/payload.h"
#include "muster/rpc/traffic.h"
#include "muster/rpc/worker.h"
#include "rpc/kit/devices.h"
#include "rpc/kit/executor.h"
#include "rpc/kit/interceptor.h"
#include "rpc/objects/agent_messages.h"
#include "rpc/objects/object_table.h"
#include "rpc/objects/reference.h"
#include "shm/bell.h"
#include "transport/shm/shm_transport.h"
#include "transport/transport.h"

namespace muster::rpc {

// A request that came: from its arrival until its reply is sent.
struct IncomingCall {
  std::shared_ptr<Agent> agent;  // suspended handlers outlive the agent's end
  int caller = 0;
  Header header;
  Deadline deadline = Deadline::never();
  const Function* function = nullptr;
  std::unique_ptr<Invocation> invocation;
  std::shared_ptr<void> above;  // what Interceptor::incoming() gave
  std::atomic<bool> cancelled{false};
  std::atomic<bool> taken{false};  // the invocation: to be run, or to be dropped if the call was given up
};

// The part of an agent that futures know. Never freed: a future may outlive everything else.
class Proxy final : public Waits {
 public:
  explicit Proxy(std::weak_ptr<Agent> agent) : agent_(std::move(agent)) {}
  bool wait(detail::FutureState& state, Deadline deadline) override;
  void run(std::function<void()> continuation) override;
  void cancel(detail::FutureState& state) override;

 private:
  const std::weak_ptr<Agent> agent_;
};

class Agent final : public std::enable_shared_from_this<Agent>, private transport::Receiver, private Driver {
 public:
  Agent(const World& world, Options options);
  ~Agent();
  void start(const World& world);  // connects with the other workers
  void shut_down(Shutdown how, Deadline deadline);
  void close(Deadline flush = Deadline::after(std::chrono::milliseconds(500)));  // nothing of it runs afterwards

  int rank() const { return self_; }
  const Options& options() const { return options_; }
  const std::vector<WorkerInfo>& workers() const { return workers_; }
  const WorkerInfo& self() const { return workers_[static_cast<size_t>(self_)]; }
  const WorkerInfo& find(std::string_view name) const;
  const WorkerInfo& find(int rank) const;
  bool is_alive(int rank) const;
  Census census() const;
  Traffic traffic() const;

  // Starts a call, which ends exactly once. Throws InvalidArgument for arguments that cannot be sent, TimeoutError if
  // it could not be sent until `send_by` (none: as `spec` says).
  void call(int to, const detail::CallSpec& spec, Payload payload, detail::PendingCall& call,
            std::optional<Deadline> send_by = {});
  uint64_t new_object();
  // Stores an object of this worker, and returns a hold on it.
  std::shared_ptr<detail::Reference> keep(StoredObject stored);
  // The same for a reference that is put into one message to `to`, and nowhere else. The hold belongs to that worker
  // from the beginning; it goes with the message, or ends with the reference. For objects of the layer above, not for
  // objects of the user.
  std::shared_ptr<detail::Reference> keep_for(int to, StoredObject stored);
  std::shared_ptr<detail::Reference> hold(int owner, uint64_t object);
  ObjectTable& objects() { return objects_; }
  Interceptor& interceptor() { return *interceptor_; }
  // Tells a worker that what the layer above calls `context` has ended here. It does not answer.
  void tell_end(int worker, uint64_t context) {
    send_quietly(worker, {.kind = MessageKind::kContextEnded, .context = context});
  }
  void let_go(const detail::Reference& reference);
  void check_is_own(const detail::Reference& reference) const;  // Aborted if another agent made it

  // For futures (future.h)
  Waits* waits() const { return proxy_; }
  bool wait(detail::FutureState& state, Deadline deadline);
  void wait_unless_closing(detail::FutureState& state);  // Aborted
  void run(std::function<void()> continuation);
  void cancel(detail::FutureState& state);
  bool in_handler() const { return executor_ && executor_->in_pool(); }

 private:
  struct Peer {
    std::atomic<transport::Transport*> way{nullptr};
    std::atomic<int> outstanding{0};           // calls that it has not answered
    std::atomic<size_t> outstanding_bytes{0};  // of large ones among them; shrinks under pending_mutex_
    // Those of them that are no longer pending, and their bytes if they are large; guarded by pending_mutex_.
    std::unordered_map<uint64_t, size_t> given_up;
    std::atomic<uint64_t> calls{0}, sent{0}, received{0};  // traffic.h
    std::atomic<bool> lost{false};
    std::string cause;  // set before `lost`
    int pid = 0;
    shm::Bell room;
    std::map<uint64_t, std::shared_ptr<IncomingCall>> running;  // by call; guarded by running_mutex_
    std::map<uint64_t, uint64_t> idle;                          // calls made, by round; guarded by state_mutex_
  };

  // transport::Receiver
  void on_message(int peer, std::string_view body, std::vector<transport::Piece>& pieces) override;
  void on_lost(int peer, const std::string& cause) override;
  // Driver
  bool poll() override { return !forked() && shm_->poll(); }
  void sleep(std::chrono::nanoseconds limit) override { shm_->sleep(limit); }
  void wake() override {
    if (!forked()) shm_->wake();
  }
  void hush(bool on) override {
    if (!forked()) shm_->hush(on);
  }
  void announce_waiting() override { shm_->announce_waiting(); }
  bool pending() const override { return !forked() && shm_->pending(); }
  void sleep_second(std::chrono::nanoseconds limit, const std::function<bool()>& unless) override {
    shm_->sleep_second(limit, unless);
  }
  void wake_second() override {
    if (!forked()) shm_->wake_second();
  }
  Clock::time_point next_tick() const override;
  void tick(Clock::time_point now) override;

  class CallRunnable;
  class GarbageRunnable;
  // Marks a reply or a loss as being handled, because what follows from it may not be counted anywhere else yet.
  class Active {
   public:
    explicit Active(Agent& agent) : agent_(agent) { agent_.active_.fetch_add(1, std::memory_order_seq_cst); }
    Active(const Active&) = delete;
    Active& operator=(const Active&) = delete;
    ~Active() {
      agent_.active_.fetch_sub(1, std::memory_order_seq_cst);
      agent_.changed();
    }

   private:
    Agent& agent_;
  };
  struct Pending {
    detail::StateRef<detail::FutureState> state;
    detail::PendingCall* call = nullptr;  // the same
    size_t bytes = 0;                     // of its message, if that is large

    explicit operator bool() const { return call != nullptr; }
    void fail(std::exception_ptr error) {
      call->sent.reset();
      state->try_set_error(std::move(error));
    }
  };
  Peer& peer(int rank) const { return *peers_[static_cast<size_t>(rank)]; }
  PeerLost lost_error(int rank) const;
  void wait_for_room(int to, Deadline deadline);
  void say_what_runs() const;
  void take_bytes(int to, uint64_t call, size_t bytes, Deadline deadline, bool may_wait);
  void wait_for_backlog(int to, Deadline deadline);
  void send(int to, Header header, Payload payload, Deadline deadline = Deadline::never());
  void send_quietly(int to, Header header);
  // Devices of a message: this worker's, by place (devices.h).
  std::span<const c10::Device> places(int peer, bool mine) const {
    return mine ? devices_.calls_to(peer) : devices_.calls_from(peer);
  }
  InvalidArgument not_mapped(int to, const Header& header, const Payload& payload, size_t tensor) const;
  std::vector<RefRecord> hand_on(int to, const Payload& payload);
  void take_back(int to, const std::vector<RefRecord>& records);
  void discard(ObjectTable::Garbage garbage);
  void on_call(int from, const Header& header, std::string_view rest, std::vector<transport::Piece>& pieces);
  void on_reply(int from, const Header& header, std::string_view rest, std::vector<transport::Piece>& pieces);
  Payload read(int from, const Header& header, std::string_view& rest, std::vector<transport::Piece>& pieces);
  void run_handler(const std::shared_ptr<IncomingCall>& call, std::shared_ptr<void> object);
  void finish(const std::shared_ptr<IncomingCall>& call, Outcome outcome);
  void fail(const std::shared_ptr<IncomingCall>& call, std::exception_ptr error);
  void send_error(const IncomingCall& call, const std::exception_ptr& error);
  void forget(const IncomingCall& call);
  std::exception_ptr late_error(const detail::PendingCall& call) const;
  bool lower_next_tick(int64_t due);
  Pending take_pending(uint64_t call, int to);
  Pending give_up(uint64_t call);
  void on_cancel(int from, const Header& header);
  std::optional<uint64_t> idle() const;
  bool forked() const { return fork_count() != forks_; }
  void check_fork() const;
  void log_ways() const;
  void changed();
  std::optional<uint64_t> wait_until_idle(Deadline deadline);  // the result of idle(); none at the deadline
  bool wait_for(const std::function<bool()>& done, Deadline deadline);

  static constexpr int64_t kNever = INT64_MAX;  // of next_tick_
  const World::Parts& world_;                   // until close()
  const Options options_;
  const int self_;
  std::vector<WorkerInfo>& workers_;  // never freed: users have references to its elements
  std::vector<std::unique_ptr<Peer>> peers_;
  Devices devices_;
  ObjectTable objects_;

  mutable std::mutex pending_mutex_;
  std::unordered_map<uint64_t, Pending> pending_;
  std::atomic<bool> closing_{false};  // no more calls; written under pending_mutex_
  std::atomic<uint64_t> made_{0};     // calls, ever
  std::atomic<int> active_{0};        // replies that are being handled
  std::atomic<uint64_t> next_call_{1}, next_object_{1}, next_token_{1};
  std::atomic<int64_t> next_tick_;  // of the steady clock

  mutable std::mutex running_mutex_;
  std::mutex state_mutex_;
  shm::Bell bell_;  // something of the state has changed: a shutdown's step, idleness
  std::atomic<int> idleness_watchers_{0};
  bool closed_ = false;

  std::shared_ptr<transport::PolledTransport> shm_;
  std::unique_ptr<transport::Transport> far_;  // tcp or ucx
  std::unique_ptr<Interceptor> interceptor_;
  std::unique_ptr<Executor> executor_;
  Waits* proxy_ = nullptr;
  const int forks_ = fork_count();
};

// What a World keeps of the agent. Its destructor closes the agent, even if others still hold the agent. Only the
// thread that begins and ends RPC uses it.
struct AttachedAgent {
  std::shared_ptr<Agent> agent;
  explicit AttachedAgent(std::shared_ptr<Agent> agent) : agent(std::move(agent)) {}
  AttachedAgent(const AttachedAgent&) = delete;
  AttachedAgent& operator=(const AttachedAgent&) = delete;
  ~AttachedAgent() { agent->close(); }
};

// The agent of the World that is current in this thread; Aborted if there is none.
std::shared_ptr<Agent> current_agent();

}  // namespace muster::rpc
