#include "autograd/passes/tape.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <typeinfo>
#include <utility>

#include "autograd/passes/call_node.h"
#include "autograd/passes/sub_graph.h"
#include "muster/base/error.h"
#include "muster/rpc/call.h"
#include "rpc/objects/agent_messages.h"
#include "rpc/objects/reference.h"

namespace muster::autograd {
namespace {

using rpc::append_pod;
using rpc::read_pod;
using rpc::detail::Reference;

// In Header::context, beside the id of a context. kOrdered: the call has a path, but is in no context.
constexpr uint64_t kRecorded = uint64_t{1} << 63, kOrdered = uint64_t{1} << 62;
constexpr uint64_t kIdBits = (uint64_t{1} << 62) - 1;

struct Sent {
  std::shared_ptr<Arguments> arguments;
  uint64_t object = 0;  // which they are
  std::shared_ptr<ContextState> context;
  rpc::Interceptor::Timeout timeout;  // the call's own, if it has one
};

// A thread's first node would have the number 0, as call nodes have: the engine might then wait for a call before it
// runs that node, and so before it sends the requests that depend on it. (In a thread that makes nodes before its first
// call, one node may still have it.)
void leave_number_0_to_call_nodes() {
  if (at::sequence_number::peek() == 0) at::sequence_number::get_and_increment();
}

// Whether the call that this thread serves has a path without a context: so have the calls that its handler makes.
bool handles_ordered_call() {
  const auto received = current_received();
  return received && !received->context && !received->path.empty();
}

bool requires_grad(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

// A slot in the note of a result. The slot of a worker other than the caller comes with a reference, and with dtype and
// shape of the argument.
constexpr uint32_t kNoReference = UINT32_MAX;
constexpr size_t kMostDims = 64;

void append_slot(std::string& note, const ReceiveNode& node, uint32_t reference) {
  append_pod(note, node.slot().owner);
  append_pod(note, node.slot().object);
  append_pod(note, node.slot().index);
  append_pod(note, reference);
  if (reference == kNoReference) return;
  const auto& like = node.input_metadata(0);
  const auto sizes = like.shape_as_dim_vector();
  append_pod(note, static_cast<uint8_t>(c10::typeMetaToScalarType(like.options().dtype())));
  append_pod(note, static_cast<uint8_t>(sizes.size()));
  for (const auto& size : sizes) append_pod(note, size.guard_int(__FILE__, __LINE__));
}

Tensor read_like(std::string_view& note) {
  const auto dtype = read_pod<uint8_t>(note), dims = read_pod<uint8_t>(note);
  if (dtype >= static_cast<uint8_t>(at::ScalarType::Undefined) || dims > kMostDims)
    throw CorruptError("the note of a remote result names a tensor that cannot exist");
  const auto type = static_cast<at::ScalarType>(dtype);
  if (!at::isFloatingType(type) && !at::isComplexType(type)) throw CorruptError("a gradient of a dtype that has none");
  std::vector<int64_t> sizes(dims);
  for (int64_t& size : sizes)
    if ((size = read_pod<int64_t>(note)) < 0) throw CorruptError("a tensor of negative size");
  return at::zeros({}, type).expand(sizes);
}

}  // namespace

Tape& tape_of(rpc::Agent& agent) { return static_cast<Tape&>(agent.interceptor()); }

std::shared_ptr<Received> current_received() {
  const auto call = std::static_pointer_cast<rpc::IncomingCall>(rpc::detail::current_call());
  return call ? std::static_pointer_cast<Received>(call->above) : nullptr;
}

std::shared_ptr<Arguments> find_arguments(rpc::Agent& agent, uint64_t object) {
  const auto stored = agent.objects().find(object);
  if (!stored || !stored->type) return nullptr;
  if (*stored->type != typeid(Arguments)) throw CorruptError("no list of arguments has this number");
  return std::static_pointer_cast<Arguments>(stored->value);
}

Tape::Tape(rpc::Agent& agent) : agent_(agent), contexts_(agent) {}

std::shared_ptr<void> Tape::counted(const Count& count) {
  count->fetch_add(1, std::memory_order_relaxed);
  return std::shared_ptr<void>(count.get(), [count](void*) { count->fetch_sub(1, std::memory_order_relaxed); });
}

Census Tape::census() const {
  return {.sub_graphs = sub_graphs_->load(), .arguments = arguments_->load(), .contexts = contexts_.size()};
}

Path Tape::next_path(ContextState* context) {
  const auto received = current_received();
  if (received && received->context.get() == context && !received->path.empty()) {
    Path path = received->path;
    path.push_back(received->calls.fetch_add(1, std::memory_order_relaxed));
    return path;
  }
  return {static_cast<uint32_t>(agent_.rank()),
          context ? context->next() : calls_.fetch_add(1, std::memory_order_relaxed)};
}

// --- the caller ---

std::shared_ptr<void> Tape::outgoing(int to, Timeout timeout, rpc::Payload& payload, uint64_t& context) {
  leave_number_0_to_call_nodes();
  auto in = current_context();
  const bool records = !payload.tensors.empty() && at::GradMode::is_enabled() &&
                       std::any_of(payload.tensors.begin(), payload.tensors.end(), requires_grad);
  const bool ordered = !in && (at::globalContext().deterministicAlgorithms() || handles_ordered_call());
  if (in) {
    in->check_agent(agent_);
    in->calls(to);
    context |= in->id();
  }
  if (ordered) context |= kOrdered;
  if (in || ordered)
    for (const uint32_t step : next_path(in.get())) append_pod(payload.note, step);
  if (!in && !records && !timeout) return nullptr;
  auto sent = std::make_shared<Sent>();
  sent->timeout = timeout;
  sent->context = std::move(in);
  if (records) {
    sent->arguments = std::make_shared<Arguments>();
    for (const Tensor& tensor : payload.tensors)
      if (requires_grad(tensor)) sent->arguments->edges.push_back(torch::autograd::impl::gradient_edge(tensor));
    sent->arguments->counted = counted(arguments_);
    const auto reference = agent_.keep_for(to, {.value = sent->arguments, .type = &typeid(Arguments)});
    sent->object = reference->object;
    payload.refs.push_back(reference);
    context |= kRecorded;
  }
  return sent;
}

// A worker remembers for a while which contexts have ended (context.h), so no call may reach it long after that.
void Tape::about_to_send(uint64_t context) {
  if (const uint64_t id = context & kIdBits; id != 0) contexts_.check(id);
}

void Tape::returned(const std::shared_ptr<void>& any, int from, uint64_t context, rpc::Payload& payload) {
  if (!(context & kRecorded)) return;
  const auto sent = std::static_pointer_cast<Sent>(any);
  std::string_view note = payload.note;
  const auto count = read_pod<uint32_t>(note);
  if (count > note.size() / sizeof(uint32_t)) throw CorruptError("the note of a remote result is shorter than it says");
  std::vector<uint32_t> results(count);
  for (uint32_t& result : results) {
    result = read_pod<uint32_t>(note);
    if (result >= payload.tensors.size() || !requires_grad(payload.tensors[result]))
      throw CorruptError("the note of a remote result names a tensor that did not come");
  }
  const auto reference_at = [&](uint32_t place) {
    if (place >= payload.refs.size())
      throw CorruptError("the note of a remote result names a reference that did not come");
    return std::static_pointer_cast<Reference>(payload.refs[place]);
  };
  auto graph = reference_at(read_pod<uint32_t>(note));
  if (graph->owner != from) throw CorruptError("the graph of a remote result is on another worker");
  edge_list slots;
  for (uint32_t left = read_pod<uint32_t>(note); left > 0; --left) {
    const auto owner = read_pod<int>(note);
    const auto object = read_pod<uint64_t>(note);
    const auto index = read_pod<uint32_t>(note), reference = read_pod<uint32_t>(note);
    if (reference != kNoReference) {
      slots.emplace_back(receive_nodes_.get(reference_at(reference), index, read_like(note)), 0);
      continue;
    }
    const auto arguments = sent && sent->object == object ? sent->arguments : find_arguments(agent_, object);
    if (owner != agent_.rank() || !arguments || index >= arguments->edges.size())
      throw CorruptError("the note of a remote result names an argument that does not exist");
    slots.push_back(arguments->edges[index]);
  }
  if (!note.empty()) throw CorruptError("the note of a remote result is longer than it says");
  const auto call = make_node<CallNode>(std::move(graph), sent ? sent->context : nullptr,
                                        sent ? sent->timeout : std::nullopt, std::move(slots));
  const auto prefetch = make_node<PrefetchNode>(call, static_cast<uint32_t>(results.size()));
  for (const uint32_t result : results) {
    const Tensor& tensor = payload.tensors[result];
    tensor.unsafeGetTensorImpl()->set_requires_grad(false);  // it is no longer a leaf
    call->add_input_metadata(tensor.is_cpu() ? tensor : on_host(tensor));
    const uint32_t number = prefetch->add_input_metadata(tensor);
    torch::autograd::impl::set_gradient_edge(tensor, {prefetch, number});
  }
}

// --- the callee ---

std::shared_ptr<void> Tape::incoming(const rpc::IncomingCall& call, rpc::Payload& payload) {
  auto received = std::make_shared<Received>();
  if (const uint64_t id = call.header.context & kIdBits) {
    if (creator_of_context(id) >= static_cast<int>(agent_.workers().size()))
      throw CorruptError("a call is in a context of a worker that does not exist");
    received->context = contexts_.find(id);
  }
  if (received->context || (call.header.context & kOrdered))
    for (std::string_view note = payload.note; !note.empty();) received->path.push_back(read_pod<uint32_t>(note));
  if (call.header.context & kRecorded) {
    if (payload.refs.empty())
      throw CorruptError("a call's arguments require grad, but the call does not say where their gradients go");
    const auto reference = std::static_pointer_cast<Reference>(payload.refs.back());
    uint32_t index = 0;
    for (const Tensor& tensor : payload.tensors) {
      if (!requires_grad(tensor)) continue;
      tensor.unsafeGetTensorImpl()->set_requires_grad(false);
      torch::autograd::impl::set_gradient_edge(tensor, receive_nodes_.edge_of(reference, index++, tensor));
    }
  }
  return received;
}

void Tape::returning(const rpc::IncomingCall& call, rpc::Payload& payload, uint64_t& context) {
  std::vector<uint32_t> results;
  edge_list edges;
  for (uint32_t i = 0; i < payload.tensors.size(); ++i) {
    if (!requires_grad(payload.tensors[i])) continue;
    results.push_back(i);
    edges.push_back(torch::autograd::impl::gradient_edge(payload.tensors[i]));
  }
  if (results.empty()) return;

  std::vector<PtrTo<ReceiveNode>> slots;
  std::vector<Node*> nodes;
  for (Node* const node : reachable(edges)) {
    if (typeid(*node) == typeid(ReceiveNode))  // there may be thousands, and a dynamic_cast takes longer
      slots.push_back(pointer_to(static_cast<ReceiveNode*>(node)));
    else if (node->num_outputs() > 0)  // the ends, as of parameters, keep nothing
      nodes.push_back(node);
  }
  const auto graph =
      std::make_shared<SubGraph>(std::move(edges), slots, std::move(nodes), nodes_, counted(sub_graphs_));
  const auto received = std::static_pointer_cast<Received>(call.above);
  if (received && received->context) received->context->add(graph);

  std::string& note = payload.note;
  append_pod(note, static_cast<uint32_t>(results.size()));
  for (const uint32_t result : results) append_pod(note, result);
  append_pod(note, static_cast<uint32_t>(payload.refs.size()));
  payload.refs.push_back(agent_.keep_for(call.caller, {.value = graph, .type = &typeid(SubGraph)}));
  append_pod(note, static_cast<uint32_t>(slots.size()));
  std::map<const void*, uint32_t> places;  // in payload.refs, of the arguments of each call
  for (const auto& slot : slots) {
    if (slot->slot().owner == call.caller) {
      append_slot(note, *slot, kNoReference);
      continue;
    }
    const auto [place, is_new] =
        places.try_emplace(slot->arguments().get(), static_cast<uint32_t>(payload.refs.size()));
    append_slot(note, *slot, place->second);
    if (is_new) payload.refs.push_back(slot->arguments());
  }
  context |= kRecorded;
}

void Tape::ended(uint64_t context) {
  for (const int worker : contexts_.end(context))
    if (worker != agent_.rank()) agent_.tell_end(worker, context);
}

void Tape::lost(int worker) {
  std::set<int> others;
  for (const auto& other : agent_.workers())
    if (other.id != agent_.rank() && agent_.is_alive(other.id)) others.insert(other.id);
  const auto [living, next] = contexts_.lost(worker, others);
  if (next == 1) return;  // this worker has never made a context
  // The lost worker may have died before it told others that a context has ended.
  agent_.run([agent = agent_.shared_from_this(), living = living, next = next] {
    for (const auto& other : agent->workers()) {
      if (other.id == agent->rank() || !agent->is_alive(other.id)) continue;
      try {
        tell_living_contexts(*agent, other.id, living, next);
      } catch (const std::exception&) {
        // That worker is lost too, or the agent ends.
      }
    }
  });
}

}  // namespace muster::autograd

namespace muster::rpc {
std::unique_ptr<Interceptor> make_interceptor(Agent& agent) { return std::make_unique<autograd::Tape>(agent); }
}  // namespace muster::rpc
