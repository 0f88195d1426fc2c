// References (rref.h): what the agent tells their owners, and what an RRef needs from the agent.
#include "rpc/agent/agent.h"

#include <cstring>
#include <utility>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/rref.h"

namespace muster::rpc {

// A reference of another agent is refused: its numbers mean other objects here, or none.
void Agent::check_is_own(const detail::Reference& reference) const {
  const auto mine = weak_from_this();
  if (reference.agent.owner_before(mine) || mine.owner_before(reference.agent))
    throw Aborted(
        "this RRef does not belong to the RPC that runs here: it was made before rpc::shutdown(), or in "
        "another World",
        "Make it again after rpc::init()");
}

// The records of the references in a payload that goes to `to`. The owner of each is told before the payload is sent.
std::vector<RefRecord> Agent::hand_on(int to, const Payload& payload) {
  for (const auto& any : payload.refs) check_is_own(*std::static_pointer_cast<detail::Reference>(any));
  std::vector<RefRecord> records;
  for (const auto& any : payload.refs) {
    auto& reference = *std::static_pointer_cast<detail::Reference>(any);
    const RefRecord record{.object = reference.object,
                           .token = next_token_.fetch_add(1, std::memory_order_relaxed),
                           .owner = reference.owner,
                           .from = self_};
    if (reference.holder == to) {
      reference.holder = detail::Reference::kGone;
    } else if (record.owner == self_) {
      objects_.add_hold(record.object, to);
    } else if (record.owner != to) {
      send_quietly(record.owner,
                   {.kind = MessageKind::kAddHolder, .object = record.object, .token = record.token, .worker = to});
    }
    records.push_back(record);
  }
  return records;
}

void Agent::take_back(int to, const std::vector<RefRecord>& records) {
  for (const RefRecord& record : records) {
    if (record.owner == self_) {
      discard(objects_.release(record.object, to));
    } else if (record.owner != to) {
      send_quietly(record.owner,
                   {.kind = MessageKind::kNotSent, .object = record.object, .token = record.token, .worker = to});
    }
  }
}

uint64_t Agent::new_object() { return object_id(self_, next_object_.fetch_add(1, std::memory_order_relaxed)); }

std::shared_ptr<detail::Reference> Agent::hold(int owner, uint64_t object) {
  return std::make_shared<detail::Reference>(weak_from_this(), owner, object);
}

std::shared_ptr<detail::Reference> Agent::keep(StoredObject stored) {
  const uint64_t object = new_object();
  objects_.put(object, std::move(stored), self_);
  return hold(self_, object);
}

std::shared_ptr<detail::Reference> Agent::keep_for(int to, StoredObject stored) {
  const uint64_t object = new_object();
  stored.is_ours = true;
  objects_.put(object, std::move(stored), to);
  auto reference = hold(self_, object);
  reference->holder = to;
  return reference;
}

// The release is sent as a message even to this worker itself: earlier messages about the object may still be on that
// way.
void Agent::let_go(const detail::Reference& reference) {
  if (forked() || closing_.load() || reference.holder == detail::Reference::kGone) return;
  if (reference.holder >= 0) return discard(objects_.release(reference.object, reference.holder));
  send_quietly(reference.owner, {.kind = MessageKind::kRelease, .object = reference.object});
}

namespace detail {

Reference::~Reference() {
  if (const auto alive = agent.lock()) alive->let_go(*this);
}

}  // namespace detail

namespace detail {

NewObject new_object(int owner) {
  const auto agent = current_agent();
  const uint64_t id = agent->new_object();
  if (owner == agent->self().id) agent->objects().expect(id, owner);  // the call itself arrives only later
  return {agent->hold(owner, id), id};
}

std::shared_ptr<Reference> keep_object(std::shared_ptr<void> value, const std::type_info& type) {
  if (!value) throw InvalidArgument("an RRef needs an object, got null");
  return current_agent()->keep({.value = std::move(value), .type = &type});
}

const WorkerInfo& owner_of(const std::shared_ptr<Reference>& reference) {
  if (!reference) throw InvalidArgument("this RRef refers to nothing", "Make it with rpc::remote or rpc::make_rref");
  const auto agent = current_agent();
  agent->check_is_own(*reference);
  return agent->find(reference->owner);
}

uint32_t add_reference(std::shared_ptr<Reference> reference) {
  auto* const refs = static_cast<std::vector<std::shared_ptr<void>>*>(muster::detail::pack_context().user);
  if (!refs) throw InvalidArgument("an RRef can only be packed by a remote call");
  if (refs->size() >= UINT16_MAX) throw InvalidArgument("a call with more than 65,535 RRefs");
  refs->push_back(std::move(reference));
  return static_cast<uint32_t>(refs->size() - 1);
}

std::shared_ptr<Reference> reference_at(const msgpack::object& in) {
  const auto* const refs = static_cast<std::vector<std::shared_ptr<void>>*>(muster::detail::pack_context().user);
  uint32_t place = 0;
  if (!refs || in.type != msgpack::type::EXT || in.via.ext.size != sizeof place || in.via.ext.type() != kReferenceExt)
    throw msgpack::type_error();
  std::memcpy(&place, in.via.ext.data(), sizeof place);
  if (place >= refs->size()) throw msgpack::type_error();
  return std::static_pointer_cast<Reference>((*refs)[place]);
}

void abandon_object(int owner, uint64_t id, std::exception_ptr error) {
  const auto agent = current_agent();
  if (owner == agent->self().id) agent->objects().set(id, {.error = std::move(error)});
}

uint64_t object_of(const Reference& reference) { return reference.object; }

std::shared_ptr<void> local_value_of(const std::shared_ptr<Reference>& reference, const std::type_info& type) {
  const WorkerInfo& owner = owner_of(reference);
  const auto agent = current_agent();
  if (owner.id != agent->self().id)
    throw InvalidArgument(text("local_value() of an object that lives on worker \"", owner.name, '"'),
                          "Call its functions there, or take a copy with to_here()");
  // Waits as for a call, but ends when the agent closes: the object's value may never come.
  const auto promise = std::make_shared<Promise<StoredObject>>();
  const auto future = promise->future();
  if (!agent->objects().when_ready(reference->object,
                                   [promise](const StoredObject& stored) { promise->try_set_value(stored); }))
    throw Aborted("the remote object is gone");
  agent->wait_unless_closing(future.state());
  const StoredObject stored = future.get();
  if (stored.error) std::rethrow_exception(stored.error);
  if (*stored.type != type) throw InvalidArgument("the remote object is not of the type that its RRef says");
  return stored.value;
}

}  // namespace detail

}  // namespace muster::rpc
