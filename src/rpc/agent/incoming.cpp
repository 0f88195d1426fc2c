// Incoming messages: requests and their handlers, replies, messages about references and shutdown; and losses.
#include "rpc/agent/agent.h"

#include <c10/core/InferenceMode.h>

#include <optional>
#include <utility>

#include "base/cycles.h"
#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "rpc/kit/profiled.h"
#include "rpc/values/error_reply.h"
#include "rpc/values/tensor_table.h"

namespace muster::rpc {
namespace {

Header header_of(std::string_view& body) {
  const auto header = read_pod<Header>(body);
  if (header.payload > body.size()) throw CorruptError("a message of the agent is shorter than it says");
  return header;
}

}  // namespace

// A request whose turn has come.
class Agent::CallRunnable final : public Runnable {
 public:
  CallRunnable(Agent& agent, std::shared_ptr<IncomingCall> call, std::shared_ptr<void> object)
      : agent_(agent), call_(std::move(call)), object_(std::move(object)) {}
  void run() noexcept override { agent_.run_handler(call_, std::move(object_)); }

 private:
  Agent& agent_;
  std::shared_ptr<IncomingCall> call_;
  std::shared_ptr<void> object_;
};

// Destroys objects that nobody holds any more. The destructor of a user's object may call and wait, which a thread that
// delivers a message must not do.
class Agent::GarbageRunnable final : public Runnable {
 public:
  explicit GarbageRunnable(ObjectTable::Garbage garbage) : garbage_(std::move(garbage)) {}
  void run() noexcept override { garbage_.nodes.clear(); }

 private:
  ObjectTable::Garbage garbage_;
};

void Agent::discard(ObjectTable::Garbage garbage) {
  if (garbage.has_users) executor_->post(std::make_unique<GarbageRunnable>(std::move(garbage)));
}

void Agent::on_message(int from, std::string_view body, std::vector<transport::Piece>& pieces) {
  // The thread that polls also reads messages for others, and its inference mode is not theirs.
  std::optional<c10::InferenceMode> normal;
  if (c10::InferenceMode::is_enabled()) normal.emplace(false);
  size_t bytes = body.size();
  for (const transport::Piece& piece : pieces) bytes += piece.bytes;
  peer(from).received.fetch_add(bytes, std::memory_order_relaxed);
  try {
    const Header header = header_of(body);
    switch (header.kind) {
      case MessageKind::kCall:
        return on_call(from, header, body, pieces);
      case MessageKind::kReply:
      case MessageKind::kError:
        return on_reply(from, header, body, pieces);
      case MessageKind::kCancel:
        return on_cancel(from, header);
      case MessageKind::kAddHolder:
        return objects_.add_transit(header.object, from, header.worker, header.token);
      case MessageKind::kHolds:
        return objects_.received(header.object, header.worker, header.token, from);
      case MessageKind::kRelease:
        return discard(objects_.release(header.object, from));
      case MessageKind::kDrained:
        return discard(objects_.drained(from, header.worker));
      case MessageKind::kNotSent:
        return discard(objects_.drop_transit(header.object, from, header.worker, header.token));
      case MessageKind::kIdle: {
        {
          const std::lock_guard lock(state_mutex_);
          peer(from).idle[header.token] = header.call;
        }
        bell_.ring();
        return;
      }
      case MessageKind::kContextEnded:  // what belongs to it may be the user's, as in discard()
        executor_->post([this, context = header.context] {
          try {
            interceptor_->ended(context);
          } catch (const std::exception& error) {
            MUSTER_LOG(kError) << "rpc: a context cannot be ended: " << error.what();
          }
        });
        return;
    }
    throw CorruptError("a message of an unknown kind");
  } catch (const std::exception& error) {
    MUSTER_LOG(kError) << "rpc: a message of worker \"" << workers_[static_cast<size_t>(from)].name
                       << "\" was dropped: " << error.what();
  } catch (...) {
    MUSTER_LOG(kError) << "rpc: a message of worker \"" << workers_[static_cast<size_t>(from)].name
                       << "\" was dropped: reading it threw something that is not a std::exception";
  }
}

// Splits a message into payload, references and tensors. `rest` begins with the payload.
Payload Agent::read(int from, const Header& header, std::string_view& rest, std::vector<transport::Piece>& pieces) {
  Payload payload;
  rest.remove_prefix(header.payload);
  if (header.kind == MessageKind::kCall || header.kind == MessageKind::kReply) {
    if (header.token > rest.size()) throw CorruptError("a message of the agent is shorter than it says");
    payload.note = rest.substr(0, header.token);
    rest.remove_prefix(header.token);
  }
  for (int i = 0; i < header.refs; ++i) {
    const auto record = read_pod<RefRecord>(rest);
    find(record.owner);
    if (record.owner == from) {
      // The sender is the owner, and counted this hold before it sent the reference.
    } else if (record.owner == self_) {
      objects_.add_hold(record.object, self_);  // the sender still holds it: its release comes later on the same way
    } else {
      send_quietly(record.owner,
                   {.kind = MessageKind::kHolds, .object = record.object, .token = record.token, .worker = from});
    }
    payload.refs.push_back(hold(record.owner, record.object));
  }
  if (!rest.empty()) {
    WireReader table(rest);
    payload.tensors = detail::read_tensors(table, pieces, places(from, header.kind != MessageKind::kCall));
    table.expect_done();
  }
  return payload;
}

void Agent::on_call(int from, const Header& header, std::string_view rest, std::vector<transport::Piece>& pieces) {
  auto call = std::make_shared<IncomingCall>();
  call->agent = shared_from_this();
  call->caller = from;
  call->header = header;
  if (header.timeout_ms != 0)
    call->deadline = Deadline::after(std::chrono::milliseconds(header.timeout_ms), FastClock::now());
  call->function = find_function(header.function);  // before others see the call
  {
    const std::lock_guard lock(running_mutex_);
    peer(from).running.emplace(header.call, call);
  }
  if (closing_.load()) call->cancelled.store(true, std::memory_order_release);  // close() may have missed it
  if ((header.flags & kStore) && from != self_ && creator_of(header.result) == from)
    objects_.expect(header.result, from);
  try {
    const std::string_view body = rest.substr(0, header.payload);
    Payload payload = read(from, header, rest, pieces);
    if (!call->function)
      throw InvalidArgument(text("worker \"", self().name, "\" has no such function"),
                            "Run the same program, or one that names this function, in both workers");
    if ((header.object == 0) != (call->function->object_type == nullptr))
      throw InvalidArgument("a function of an object was called without one, or the other way round");
    if ((header.flags & kStore) && (!call->function->stored_type || creator_of(header.result) != from))
      throw InvalidArgument("the result of this call cannot be kept as an object");
    if (header.context != 0) call->above = interceptor_->incoming(*call, payload);
    PayloadReader reader{body, payload.tensors, &payload.refs};
    call->invocation = call->function->decode(reader);
  } catch (...) {
    return fail(call, std::current_exception());
  }
  const auto post = [this](std::shared_ptr<IncomingCall> ready, std::shared_ptr<void> object) {
    IncomingCall& mine = *ready;
    if (!executor_->post(std::make_unique<CallRunnable>(*this, std::move(ready), std::move(object)))) forget(mine);
  };
  if (header.object == 0) return post(call, nullptr);
  const bool there = objects_.when_ready(header.object, [this, call, post](StoredObject stored) {
    if (stored.error) return fail(call, stored.error);
    if (*call->function->object_type != *stored.type)
      return fail(call, std::make_exception_ptr(
                            InvalidArgument("the remote object is not of the type that the function is called on")));
    post(call, std::move(stored.value));
  });
  if (!there) fail(call, std::make_exception_ptr(Aborted("the remote object is gone")));
}

// A cancelled call that waits for its turn no longer needs its arguments. It is answered in its turn, not now: until
// then its caller makes no other call in its place, so there are never more calls here than the caller may make. A call
// whose result is to be stored is left alone, because the object is made even if the caller is lost.
void Agent::on_cancel(int from, const Header& header) {
  std::shared_ptr<IncomingCall> call;
  {
    const std::lock_guard lock(running_mutex_);
    const auto it = peer(from).running.find(header.call);
    if (it == peer(from).running.end()) return;
    call = it->second;
  }
  call->cancelled.store(true, std::memory_order_release);
  if (!(call->header.flags & kStore) && !call->taken.exchange(true)) call->invocation.reset();
}

void Agent::run_handler(const std::shared_ptr<IncomingCall>& call, std::shared_ptr<void> object) {
  // If nobody waits for the result, the function does not run; fail() then gives an object that the call was to make
  // its error. But if the caller, the object's creator, is lost, the function runs: others may hold the object already.
  const bool orphan = (call->header.flags & kStore) && peer(call->caller).lost.load() && !closing_.load();
  const bool dropped = call->taken.exchange(true);
  if (dropped || (call->cancelled.load(std::memory_order_acquire) && !orphan) || has_passed(call->deadline))
    return fail(call, std::make_exception_ptr(Aborted("the call was cancelled before it began")));
  const detail::CallContext::Scope scope({.call = call, .grad_mode = !(call->header.flags & kNoGrad)});
  const ProfilerEvent event("handler ", call->function->name, " <- ", workers_[static_cast<size_t>(call->caller)].name);
  Invocation& invocation = *call->invocation;
  void* const target = object.get();
  invocation.run(target, (call->header.flags & kStore) != 0, [call, object = std::move(object)](Outcome&& outcome) {
    call->agent->finish(call, std::move(outcome));
  });
}

void Agent::finish(const std::shared_ptr<IncomingCall>& call, Outcome outcome) {
  if (outcome.error) return fail(call, outcome.error);
  const bool store = call->header.flags & kStore;
  if (store && !outcome.object)
    return fail(call,
                std::make_exception_ptr(InvalidArgument("a function whose result is to be kept returned nothing")));
  if (store) {
    objects_.set(call->header.result, {.value = std::move(outcome.object), .type = outcome.type});
    outcome.value = {};
  }
  std::exception_ptr unsendable;
  try {
    if (!closing_.load()) {
      Header header{.kind = MessageKind::kReply, .call = call->header.call};
      if (!outcome.value.tensors.empty() && !(call->header.flags & kNoGrad))
        interceptor_->returning(*call, outcome.value, header.context);
      send(call->caller, header, std::move(outcome.value));
    }
  } catch (const PeerLost&) {
  } catch (...) {
    unsendable = std::current_exception();
  }
  if (unsendable) send_error(*call, unsendable);
  forget(*call);
}

void Agent::fail(const std::shared_ptr<IncomingCall>& call, std::exception_ptr error) {
  if (call->header.flags & kStore) objects_.set(call->header.result, {.error = error});
  send_error(*call, error);
  forget(*call);
}

void Agent::send_error(const IncomingCall& call, const std::exception_ptr& error) {
  if (closing_.load()) return;  // the caller gets PeerLost
  try {
    Payload payload;
    payload.body = detail::encode(detail::describe(error));
    send(call.caller, {.kind = MessageKind::kError, .call = call.header.call}, std::move(payload));
  } catch (const Error&) {
    // The caller is gone.
  }
}

void Agent::forget(const IncomingCall& call) {
  {
    const std::lock_guard lock(running_mutex_);
    peer(call.caller).running.erase(call.header.call);
  }
  changed();
}

void Agent::on_reply(int from, const Header& header, std::string_view rest, std::vector<transport::Piece>& pieces) {
  const Active active(*this);
  Pending pending = take_pending(header.call, from);  // none: the reply comes too late
  const std::string_view body = rest.substr(0, header.payload);
  try {
    const auto sent = pending ? std::exchange(pending.call->sent, nullptr) : nullptr;
    Payload payload = read(from, header, rest, pieces);  // also if it is too late, because it may bring references
    if (!pending) {
    } else if (header.kind == MessageKind::kReply) {
      if (header.context != 0) interceptor_->returned(sent, from, header.context, payload);
      PayloadReader reader{body, payload.tensors, &payload.refs};
      pending.call->succeed(reader);
    } else if (pending.call->deadline.passed()) {
      pending.fail(late_error(*pending.call));  // the function saw the deadline pass before this worker looked
    } else {
      pending.fail(detail::remote_error(workers_[static_cast<size_t>(from)].name, pending.call->function->name,
                                        detail::decode_error(body)));
    }
  } catch (...) {
    if (pending) pending.fail(std::current_exception());
  }
}

void Agent::on_lost(int rank, const std::string& cause) {
  const Active active(*this);
  Peer& gone = peer(rank);
  std::vector<Pending> failed;
  {
    const std::lock_guard lock(pending_mutex_);
    gone.cause = cause;
    gone.lost.store(true, std::memory_order_release);
    for (auto it = pending_.begin(); it != pending_.end();) {
      const auto next = std::next(it);
      if (it->second.call->to == rank) {
        failed.push_back(std::move(it->second));
        pending_.erase(it);
      }
      it = next;
    }
    gone.given_up.clear();
    gone.outstanding_bytes.store(0, std::memory_order_release);
  }
  gone.outstanding.store(0, std::memory_order_release);
  gone.room.ring();
  const auto error = std::make_exception_ptr(lost_error(rank));
  for (Pending& pending : failed) pending.fail(error);
  {
    const std::lock_guard lock(running_mutex_);
    for (auto& [id, call] : gone.running) call->cancelled.store(true, std::memory_order_release);
  }
  interceptor_->lost(rank);
  discard(objects_.lost(rank));
  for (const auto& worker : workers_)
    if (worker.id != self_ && worker.id != rank && !peer(worker.id).lost.load())
      send_quietly(worker.id, {.kind = MessageKind::kDrained, .worker = rank});
  bell_.ring();
}

}  // namespace muster::rpc
