// Outgoing calls: making them, waiting, cancellation, deadlines.
#include "rpc/agent/agent.h"

#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "base/cycles.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "rpc/kit/profiled.h"
#include "rpc/values/tensor_table.h"

namespace muster::rpc {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;

// A message of at least this size waits for room on the way before it is sent.
constexpr size_t kLarge = 64 << 10;
// Between looks at conditions that ring no bell.
constexpr milliseconds kLook{50};
int64_t ticks(Clock::time_point time) { return nanoseconds(time.time_since_epoch()).count(); }

}  // namespace

PeerLost Agent::lost_error(int rank) const {
  const Peer& lost = peer(rank);
  return {rank, lost.pid, text("worker \"", workers_[static_cast<size_t>(rank)].name, "\" is lost: ", lost.cause)};
}

// Waits while max_calls calls to the worker are under way.
void Agent::wait_for_room(int to, Deadline deadline) {
  Peer& there = peer(to);
  const auto room = [&] {
    return there.outstanding.load(std::memory_order_acquire) < options_.max_calls || there.lost.load() ||
           closing_.load();
  };
  if (room()) return;
  if (!executor_->wait(
          room, [&](nanoseconds limit) { there.room.sleep(limit, room); }, deadline))
    throw TimeoutError(text("worker \"", workers_[static_cast<size_t>(to)].name, "\" has not answered ",
                            there.outstanding.load(), " calls; no more can be made"));
}

// Waits until the arguments of unanswered calls leave room for those of a call, and takes it. A call that needs more
// than all of max_call_bytes waits until it is the only large one.
void Agent::take_bytes(int to, uint64_t call, size_t bytes, Deadline deadline, bool may_wait) {
  Peer& there = peer(to);
  const size_t most = may_wait ? options_.max_call_bytes : SIZE_MAX;
  bool taken = false;
  const auto room = [&] {
    size_t others = there.outstanding_bytes.load(std::memory_order_acquire);
    while (!taken && (others == 0 || (others <= most && bytes <= most - others)))
      taken = there.outstanding_bytes.compare_exchange_weak(others, others + bytes, std::memory_order_acq_rel);
    return taken || there.lost.load() || closing_.load();
  };
  if (!room() && !executor_->wait(
                     room, [&](nanoseconds limit) { there.room.sleep(limit, room); }, deadline))
    throw TimeoutError(
        text("worker \"", workers_[static_cast<size_t>(to)].name, "\" has not answered calls with ",
             there.outstanding_bytes.load(), " bytes of arguments; a call with ", bytes, " more cannot be made"),
        {}, "Raise rpc::Options::max_call_bytes if calls that wait for one another carry so much");
  if (!taken) return;  // the worker is lost, or this one ends: nothing will be sent
  const std::lock_guard lock(pending_mutex_);
  if (const auto it = pending_.find(call); it != pending_.end())
    it->second.bytes = bytes;
  else if (const auto given_up = there.given_up.find(call); given_up != there.given_up.end())
    given_up->second = bytes;  // the caller did not wait for it, but it will be sent
  // Else the worker was lost meanwhile, and nothing counts any more.
}

// Waits while more than max_backlog bytes wait on the way to the worker. If the thread is one of the pool, another
// takes its place meanwhile.
void Agent::wait_for_backlog(int to, Deadline deadline) {
  transport::Transport& way = *peer(to).way.load(std::memory_order_acquire);
  const auto room = [&] { return closing_.load() || peer(to).lost.load() || way.backlog(to) <= options_.max_backlog; };
  const auto sleep = [&](nanoseconds limit) {
    try {
      way.wait_below(to, options_.max_backlog, Deadline::after(std::min<nanoseconds>(limit, kLook)));
    } catch (const Error&) {
      // The deadline has passed or the worker is lost: room() is asked next.
    }
  };
  if (!room() && !executor_->wait(room, sleep, deadline))
    throw TimeoutError(text("worker \"", workers_[static_cast<size_t>(to)].name,
                            "\" does not take what was sent to it: ", way.backlog(to), " bytes wait"));
}

void Agent::call(int to, const detail::CallSpec& spec, Payload payload, detail::PendingCall& call,
                 std::optional<Deadline> send_by) {
  check_fork();
  const ProfilerEvent event("call ", spec.function->name, " -> ", workers_[static_cast<size_t>(to)].name);
  Peer& there = peer(to);
  const milliseconds timeout = spec.timeout.value_or(options_.timeout);
  if (timeout < milliseconds(0))
    throw TimeoutError(text("the time for the call of ", spec.function->name, " on worker \"",
                            workers_[static_cast<size_t>(to)].name, "\" was over before it began"),
                       {to}, "Its timeout is negative");
  const auto now = FastClock::now();
  const auto deadline = timeout > milliseconds(0) ? Deadline::after(timeout, now) : Deadline::never();
  if (!send_by)
    send_by =
        spec.is_sent_in_time && options_.timeout > milliseconds(0) ? Deadline::after(options_.timeout, now) : deadline;
  wait_for_room(to, *send_by);
  Header header{.kind = MessageKind::kCall,
                .flags = static_cast<uint8_t>((spec.store ? kStore : 0) | (c10::GradMode::is_enabled() ? 0 : kNoGrad)),
                .timeout_ms = static_cast<uint32_t>(std::clamp<int64_t>(timeout.count(), 0, UINT32_MAX)),
                .call = next_call_.fetch_add(1, std::memory_order_relaxed),
                .function = spec.function->id,
                .object = spec.object,
                .result = spec.result};
  call.sent = interceptor_->outgoing(to, spec.timeout, payload, header.context);
  call.to = to;
  call.id = header.call;
  call.function = spec.function;
  call.deadline = deadline;
  bool lost = false, closing = false;
  {
    const std::lock_guard lock(pending_mutex_);
    lost = there.lost.load(std::memory_order_acquire);
    closing = closing_.load();
    if (!lost && !closing) {
      pending_.emplace(header.call, Pending{detail::StateRef<detail::FutureState>(&call.state()), &call});
      there.outstanding.fetch_add(1, std::memory_order_relaxed);
      made_.fetch_add(1, std::memory_order_seq_cst);
    }
  }
  if (closing) call.state().try_set_error(std::make_exception_ptr(Aborted("this worker's RPC has been shut down")));
  if (lost) call.state().try_set_error(std::make_exception_ptr(lost_error(to)));
  if (lost || closing) return call.sent.reset();
  if (!deadline.is_never()) {
    if (lower_next_tick(ticks(deadline.when()))) executor_->call_on_tick();
  }
  try {
    send(to, header, std::move(payload), *send_by);
    // If the call was given up meanwhile, its kCancel has come before it, and was of no use.
    if (has_passed(deadline)) send_quietly(to, {.kind = MessageKind::kCancel, .call = header.call});
  } catch (const PeerLost&) {
    const Active active(*this);
    if (Pending mine = take_pending(header.call, to)) mine.fail(std::current_exception());
  } catch (...) {
    take_pending(header.call, to);
    throw;
  }
}

// A call to that worker was answered or could not be sent, so there is room for another one. Returns the pending call;
// none if its caller has given it up.
Agent::Pending Agent::take_pending(uint64_t call, int to) {
  Pending mine;
  Peer& there = peer(to);
  size_t bytes = 0;
  {
    const std::lock_guard lock(pending_mutex_);
    const auto it = pending_.find(call);
    if (it == pending_.end()) {
      const auto given_up = there.given_up.find(call);
      if (given_up == there.given_up.end()) return {};
      bytes = given_up->second;
      there.given_up.erase(given_up);
    } else {
      if (it->second.call->to != to) return {};
      bytes = it->second.bytes;
      mine = std::move(it->second);
      pending_.erase(it);
    }
    there.outstanding_bytes.fetch_sub(bytes, std::memory_order_acq_rel);
  }
  if (there.outstanding.fetch_sub(1, std::memory_order_acq_rel) >= options_.max_calls || bytes > 0) there.room.ring();
  changed();
  return mine;
}

// The caller no longer waits for the call, but the callee still has it: it counts until it is answered.
Agent::Pending Agent::give_up(uint64_t call) {
  Pending mine;
  {
    const std::lock_guard lock(pending_mutex_);
    const auto it = pending_.find(call);
    if (it == pending_.end()) return {};
    peer(it->second.call->to).given_up.emplace(call, it->second.bytes);
    mine = std::move(it->second);
    pending_.erase(it);
  }
  changed();
  return mine;
}

// The error for a tensor on a device that is missing from the device map of its call.
InvalidArgument Agent::not_mapped(int to, const Header& header, const Payload& payload, size_t tensor) const {
  const std::string device = payload.tensors[tensor].device().str();
  const std::string &me = self().name, &there = workers_[static_cast<size_t>(to)].name;
  if (header.kind != MessageKind::kCall)
    return InvalidArgument(
        text("the result has a tensor on ", device, " of worker \"", me, "\", which is not mapped for calls from \"",
             there, '"'),
        text("Map it in worker \"", there, "\", rpc::Options::device_maps[\"", me, "\"], or return .cpu()"));
  const Function* const function = find_function(header.function);
  const auto number = detail::argument_with(payload.body, tensor);
  return InvalidArgument(
      text("argument ", number ? std::to_string(*number) : "?", " of ", function ? function->name : "a function",
           " has a tensor on ", device, ", which is not mapped for worker \"", there, '"'),
      text("Map it in rpc::Options::device_maps[\"", there, "\"], or send .cpu()"));
}

// Sends header, payload, references and tensors as one message.
void Agent::send(int to, Header header, Payload payload, Deadline deadline) {
  transport::Transport* const way = peer(to).way.load(std::memory_order_acquire);
  if (!way) throw Unavailable("there is no way to the worker yet");
  if (payload.body.size() > UINT32_MAX || payload.refs.size() > UINT16_MAX)
    throw InvalidArgument("arguments or a result of more than 1 GiB besides tensors, or with more than 65,535 RRefs");
  header.payload = static_cast<uint32_t>(payload.body.size());
  header.refs = static_cast<uint16_t>(payload.refs.size());
  if (!payload.note.empty()) header.token = payload.note.size();
  std::string table;
  transport::Message message;
  if (!payload.tensors.empty()) try {
      detail::write_tensors(payload.tensors, table, message.pieces, places(to, header.kind == MessageKind::kCall));
    } catch (const detail::WithoutPlace& error) {
      throw not_mapped(to, header, payload, error.tensor);
    }
  message.body.reserve(sizeof header + payload.body.size() + payload.note.size() +
                       payload.refs.size() * sizeof(RefRecord) + table.size());
  append_pod(message.body, header);
  message.body += payload.body;
  message.body += payload.note;
  if (message.bytes() >= kLarge) {
    const bool may_wait = !Executor::polls();
    if (header.kind == MessageKind::kCall) take_bytes(to, header.call, message.bytes(), deadline, may_wait);
    if (may_wait) wait_for_backlog(to, deadline);
    if (header.kind == MessageKind::kCall && header.context != 0) interceptor_->about_to_send(header.context);
  }
  const auto records = hand_on(to, payload);
  for (const RefRecord& record : records) append_pod(message.body, record);
  message.body += table;
  message.can_wait = header.kind == MessageKind::kRelease && executor_ && executor_->polls_as_leader();
  const size_t bytes = message.bytes();
  try {
    way->send(to, std::move(message));
  } catch (const PeerLost&) {
    throw;  // the owners learn of the loss by themselves
  } catch (...) {
    take_back(to, records);
    throw;
  }
  peer(to).sent.fetch_add(bytes, std::memory_order_relaxed);
  if (header.kind == MessageKind::kCall) peer(to).calls.fetch_add(1, std::memory_order_relaxed);
}

void Agent::send_quietly(int to, Header header) {
  try {
    send(to, header, {});
  } catch (const Error&) {
    // The worker is lost: on_lost() reports it.
  }
}

// --- waiting and deadlines ---

bool Agent::wait(detail::FutureState& state, Deadline deadline) {
  if (forked()) return state.sleep(deadline);
  const ProfilerEvent event("wait");
  return executor_->wait([&] { return state.done(); }, [&](nanoseconds limit) { state.sleep(Deadline::after(limit)); },
                         deadline);
}

void Agent::wait_unless_closing(detail::FutureState& state) {
  check_fork();
  const auto done = [&] { return state.done() || closing_.load(); };
  // close() does not know this state and cannot wake its waiters, so they look from time to time.
  const auto sleep = [&](nanoseconds limit) { state.sleep(Deadline::after(std::min<nanoseconds>(limit, kLook))); };
  executor_->wait(done, sleep, Deadline::never());
  if (!state.done()) throw Aborted("this worker's RPC has been shut down");
}

void Agent::run(std::function<void()> continuation) {
  if (!executor_->post(continuation)) continuation();  // the pool is gone
}

bool Proxy::wait(detail::FutureState& state, Deadline deadline) {
  if (const auto agent = agent_.lock()) return agent->wait(state, deadline);
  return state.sleep(deadline);
}
void Proxy::run(std::function<void()> continuation) {
  if (const auto agent = agent_.lock()) return agent->run(std::move(continuation));
  continuation();
}
void Proxy::cancel(detail::FutureState& state) {
  if (const auto agent = agent_.lock()) agent->cancel(state);
}

// The state is already complete, with Aborted. If it is that of a call, the callee is told; a derived state has none.
void Agent::cancel(detail::FutureState& state) {
  const auto* const call = dynamic_cast<detail::PendingCall*>(&state);
  if (!call || forked()) return;
  const Active active(*this);
  if (const Pending mine = give_up(call->id)) send_quietly(call->to, {.kind = MessageKind::kCancel, .call = call->id});
}

std::exception_ptr Agent::late_error(const detail::PendingCall& call) const {
  return std::make_exception_ptr(TimeoutError(text("worker \"", workers_[static_cast<size_t>(call.to)].name,
                                                   "\" did not answer ", call.function->name, " in time"),
                                              {call.to}));
}

// Lets the next tick be at `due` at the latest; returns whether it was later before.
bool Agent::lower_next_tick(int64_t due) {
  int64_t next = next_tick_.load(std::memory_order_relaxed);
  while (due < next)
    if (next_tick_.compare_exchange_weak(next, due)) return true;
  return false;
}

Clock::time_point Agent::next_tick() const {
  const int64_t next = next_tick_.load(std::memory_order_seq_cst);
  return next == kNever ? Clock::time_point::max() : Clock::time_point(nanoseconds(next));
}

void Agent::tick(Clock::time_point now) {
  next_tick_.store(kNever, std::memory_order_relaxed);
  std::vector<uint64_t> late;
  int64_t next = kNever;
  {
    const std::lock_guard lock(pending_mutex_);
    for (const auto& [id, pending] : pending_) {
      const Deadline deadline = pending.call->deadline;
      if (deadline.is_never()) continue;
      if (deadline.when() <= now) {
        late.push_back(id);
      } else {
        next = std::min(next, ticks(deadline.when()));
      }
    }
  }
  lower_next_tick(next);
  if (next != kNever) executor_->call_on_tick();  // a thread that looked meanwhile has seen kNever
  const Active active(*this);
  for (const uint64_t id : late) {
    Pending pending = give_up(id);
    if (!pending) continue;
    // kCancel goes first: a caller that sees the timeout may rely on the callee being told to stop before anything that
    // the caller sends afterwards.
    send_quietly(pending.call->to, {.kind = MessageKind::kCancel, .call = id});
    pending.fail(late_error(*pending.call));
  }
}

}  // namespace muster::rpc
