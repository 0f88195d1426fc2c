#include "comm/kit/operation_record.h"

#include <array>
#include <string>
#include <string_view>
#include <utility>

#include "base/hash.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

uint64_t nanoseconds_of(Clock::time_point time) { return static_cast<uint64_t>(time.time_since_epoch().count()); }

// The dtype of what the operation moves, for its entry.
at::ScalarType dtype_of(const Operation& operation) {
  const at::Tensor& sample =
      operation.tensor.defined() || operation.inputs.empty() ? operation.tensor : operation.inputs[0];
  return sample.defined() ? sample.scalar_type() : at::kByte;
}

// A number that this group's ranks have in common. A group that is made anew after the loss of a rank has other
// processes.
uint64_t meeting_of(const GroupContext& group) {
  std::string all = group.store_prefix;
  for (const Member& member : group.members) all += text(' ', member.pid, ' ', member.start);
  return hash_of_bytes(all.data(), all.size());
}

}  // namespace

OperationLog::OperationLog(const BackendContext& context) : black_box_(context.host.black_box) {
  if (!black_box_) return;
  static const std::vector<std::string> dtypes = [] {
    std::vector<std::string> names;
    for (int i = 0; i < static_cast<int>(c10::ScalarType::NumOptions); ++i)
      names.emplace_back(c10::toString(static_cast<c10::ScalarType>(i)));
    return names;
  }();
  black_box_->set_names(kOpNames, std::vector<std::string_view>(dtypes.begin(), dtypes.end()));
  group_ = black_box_->group(context.group.name, context.group.global_ranks, meeting_of(context.group));
}

uint64_t OperationLog::begin(const Operation& operation, uint64_t sequence, Clock::time_point now) const {
  if (!black_box_) return 0;
  return black_box_->begin(entry_of(operation.kind, operation.peer, operation.tag, dtype_of(operation),
                                    bytes_of(operation), sequence, shm::BlackBoxState::kRunning),
                           nanoseconds_of(now));
}

uint64_t OperationLog::begin(const SmallCall& call, at::ScalarType dtype, size_t bytes, uint64_t sequence,
                             Clock::time_point now) const {
  if (!black_box_) return 0;
  return black_box_->begin(
      entry_of(call.kind, call.peer, call.tag, dtype, bytes, sequence, shm::BlackBoxState::kRunning),
      nanoseconds_of(now));
}

uint64_t OperationLog::post(const Operation& operation) const {
  if (!black_box_) return 0;
  return black_box_->begin(entry_of(operation.kind, operation.peer, operation.tag, dtype_of(operation),
                                    bytes_of(operation), shm::kNoSequence, shm::BlackBoxState::kPosted),
                           nanoseconds_of(Clock::now()));
}

void OperationLog::start(uint64_t ticket, uint64_t sequence) const {
  if (black_box_) black_box_->start(ticket, sequence);
}

void OperationLog::add(const SmallCall& call, at::ScalarType dtype, size_t bytes, Clock::time_point began,
                       Clock::time_point ended) const {
  if (!black_box_) return;
  black_box_->add(entry_of(call.kind, call.peer, call.tag, dtype, bytes, shm::kNoSequence, shm::BlackBoxState::kDone),
                  nanoseconds_of(began), nanoseconds_of(ended));
}

void OperationLog::end(uint64_t ticket, const std::exception_ptr& error, Clock::time_point now) const {
  if (!black_box_) return;
  auto state = shm::BlackBoxState::kDone;
  if (error) {
    state = shm::BlackBoxState::kFailed;
    try {
      std::rethrow_exception(error);
    } catch (const Error& ours) {
      state = shm::state_of(ours);
    } catch (...) {
    }
  }
  black_box_->end(ticket, state, nanoseconds_of(now));
}

shm::BlackBoxEntry OperationLog::entry_of(OpKind kind, int peer, int tag, at::ScalarType dtype, size_t bytes,
                                          uint64_t sequence, shm::BlackBoxState state) const {
  const bool message = is_message(kind), rooted = kind == OpKind::kBroadcast || kind == OpKind::kReduce ||
                                                  kind == OpKind::kGather || kind == OpKind::kScatter;
  return {.group = group_,
          .operation = static_cast<uint8_t>(kind),
          .dtype = static_cast<uint8_t>(dtype),
          .bytes = bytes,
          .sequence = message ? shm::kNoSequence : sequence,
          .peer = message || rooted ? peer : -1,
          .tag = static_cast<uint64_t>(tag),
          .state = state};
}

OperationRecord::OperationRecord(const OperationLog& log, OperationCounters& counters, const Operation& operation)
    : log_(log), counters_(counters), operation_(&operation) {
  if (profiling()) [[unlikely]]
    begin_event();
  began_ = FastClock::now();
}

void OperationRecord::begin_event() {
  std::vector<c10::IValue> inputs;
  for (const auto& tensor : profiled_inputs({operation_, 1})) inputs.emplace_back(tensor);
  event_.emplace(at::RecordScope::USER_SCOPE);
  if (!event_->isActive()) return;
  event_->_setAsync();  // as c10d::Work does, so that all of a backend's events are of one kind
  event_->before(profiling_title(*operation_), c10::ArrayRef<const c10::IValue>(inputs.data(), inputs.size()));
}

WorkRecord::WorkRecord(const OperationLog* log, std::shared_ptr<OperationCounters> counters,
                       std::span<const Operation> operations, std::optional<uint64_t> running)
    : log_(log ? std::optional(*log) : std::nullopt), counters_(std::move(counters)), over_(false) {
  tickets_.reserve(log_ ? operations.size() : 0);
  if (log_)
    for (const auto& operation : operations)
      tickets_.push_back(running ? log_->begin(operation, *running, Clock::now()) : log_->post(operation));
  counters_->under_way.fetch_add(1, std::memory_order_relaxed);
}

WorkRecord::~WorkRecord() {
  if (!over_) end(std::make_exception_ptr(Aborted("nothing has run the operation")));
}

void WorkRecord::end(const std::exception_ptr& error) {
  while (ended_ < tickets_.size()) end_next(error);
  if (!std::exchange(over_, true)) counters_->under_way.fetch_sub(1, std::memory_order_release);
}

size_t bytes_of(const Operation& operation) {
  size_t size = 0;
  if (operation.kind == OpKind::kAllToAll)
    for (const auto& input : operation.inputs) size += input.nbytes();
  else if (operation.tensor.defined() && operation.tensor.layout() == at::kStrided)
    size = operation.tensor.nbytes();
  return size;
}

void OperationCounters::count(const Operation& operation) { count(bytes_of(operation)); }

CommStats OperationCounters::stats() const {
  return {.operations = completed(),
          .bytes = sum(&Counts::bytes),
          .blocked = std::chrono::nanoseconds(sum(&Counts::blocked_ns))};
}

const char* profiling_title(const Operation& operation) {
  if (operation.kind == OpKind::kRecv && operation.peer == kAnySource) return "muster:recvAnySource";
  static const auto titles = [] {
    std::array<std::string, std::size(kOpNames)> list;
    for (size_t i = 0; i < list.size(); ++i) list[i] = "muster:" + std::string(kOpNames[i]);
    return list;
  }();
  return titles[static_cast<size_t>(operation.kind)].c_str();
}

std::vector<at::Tensor> profiled_inputs(std::span<const Operation> operations) {
  std::vector<at::Tensor> tensors;
  for (const auto& operation : operations) {
    tensors.insert(tensors.end(), operation.inputs.begin(), operation.inputs.end());
    if (operation.inputs.empty() && operation.tensor.defined()) tensors.push_back(operation.tensor);
  }
  return tensors;
}

bool profiling() { return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value(); }

}  // namespace muster::comm
