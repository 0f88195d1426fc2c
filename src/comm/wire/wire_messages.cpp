// Messages over a Wire (wire_backend.h): headers, payloads, and the threads that wait for them.
#include <array>

#include "base/copy.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/kit/flatten.h"
#include "comm/wire/wire_backend.h"
#include "store/kit/outage.h"

namespace muster::comm {

struct WireBackend::Envelope {
  uint64_t bytes = 0;
  uint32_t number = 0;  // the tag of the payload, if it does not fit here
  uint8_t dtype = 0;
  std::array<uint8_t, 3> unused{};
  std::array<char, 48> site{};  // where it was sent from, "train.cpp:17"
  std::array<std::byte, 240> payload{};
};

// A message under way. First comes its header, which carries all of a small message. For a larger one, the receiver
// then says that it is ready, and the payload follows.
class WireBackend::MessageTransfer {
 public:
  MessageTransfer(WireBackend& backend, const Operation& operation) : backend_(backend), operation_(operation) {
    tensor_ = sends() ? flat_.input(operation.tensor) : flat_.output(operation.tensor);
    const WireTag tag{WireKind::kMessage, static_cast<uint32_t>(operation.tag)};
    static_assert(sizeof(Envelope) == kShortMessage);
    if (!sends()) {
      head_ = backend_.wire_->receive(operation.peer, tag, reinterpret_cast<Bytes>(&header_), sizeof header_);
      return;
    }
    header_.bytes = tensor_.nbytes();
    header_.dtype = static_cast<uint8_t>(tensor_.scalar_type());
    describe(operation.site, header_.site);
    if (fits())
      copy_bytes(header_.payload.data(), data_of(tensor_), header_.bytes);
    else
      header_.number = backend.numbers_[static_cast<size_t>(operation.peer)]++ % kWireTags;
    head_ = backend_.wire_->send(operation.peer, tag, reinterpret_cast<ConstBytes>(&header_), sizeof header_);
  }

  // A receive whose header has come already, from `source`.
  MessageTransfer(WireBackend& backend, const Operation& operation, const Envelope& header, int source)
      : backend_(backend), operation_(operation), header_(header), source_(source) {
    tensor_ = flat_.output(operation.tensor);
  }

  // Returns the peer.
  int wait(Deadline deadline) {
    const int peer = head_ ? head_->wait(deadline) : source_;
    if (sends()) {
      if (!fits()) {
        std::byte word{};
        backend_.wire_->receive(peer, ready(), &word, 1)->wait(deadline);
        backend_.wire_->send(peer, payload(), data_of(tensor_), header_.bytes)->wait(deadline);
      }
      return peer;
    }
    if (header_.bytes != tensor_.nbytes() || header_.dtype != static_cast<uint8_t>(tensor_.scalar_type()))
      throw mismatch(peer);
    if (fits()) {
      copy_bytes(data_of(tensor_), header_.payload.data(), header_.bytes);
    } else {
      const std::byte word{1};
      const auto body = backend_.wire_->receive(peer, payload(), data_of(tensor_), header_.bytes);
      backend_.wire_->send(peer, ready(), &word, 1)->wait(deadline);
      body->wait(deadline);
    }
    flat_.copy_back();
    return peer;
  }

 private:
  bool sends() const { return operation_.kind == OpKind::kSend; }
  bool fits() const { return header_.bytes <= header_.payload.size(); }
  WireTag ready() const { return {WireKind::kReady, header_.number}; }
  WireTag payload() const { return {WireKind::kPayload, header_.number}; }
  Mismatch mismatch(int peer) const {
    const std::string here = find_site(operation_.site);
    const std::string_view there(header_.site.data(), ::strnlen(header_.site.data(), header_.site.size()));
    return Mismatch(describe_mismatch({backend_.shown(backend_.getRank()), here}, message_payload(operation_),
                                      operation_.tag, {backend_.shown(peer), there}, {header_.bytes, header_.dtype}),
                    kMismatchAdvice);
  }

  WireBackend& backend_;
  const Operation& operation_;
  Flatten flat_;
  at::Tensor tensor_;
  Envelope header_;
  std::unique_ptr<Wire::Transfer> head_;  // null if the header had come before
  int source_ = kAnySource;
};

void WireBackend::require_possible(const Operation& operation) const {
  if (!is_message(operation.kind)) return;
  if (operation.tag < 0 || static_cast<uint32_t>(operation.tag) >= kWireTags)
    throw InvalidArgument(
        text("tag: expected 0 to ", kWireTags - 1, " with backend '", getBackendName(), "', got ", operation.tag),
        text("Use 0 … ", kWireTags - 1));
}

std::unique_ptr<WireBackend::MessageTransfer> WireBackend::post(const Operation& operation) {
  const std::lock_guard lock(post_mutex_);
  return std::make_unique<MessageTransfer>(*this, operation);
}

std::string WireBackend::describe_message(const Operation& operation) const {
  return text(to_string(operation.kind), " of ", describe(message_payload(operation)), " with tag ", operation.tag,
              operation.kind == OpKind::kSend ? " to " : " from ",
              operation.peer == kAnySource ? std::string("any rank") : text("rank ", shown(operation.peer)));
}

void WireBackend::run_message(const Operation& operation, Deadline deadline) {
  check();
  guarded([&] { post(operation)->wait(deadline); }, [&] { return describe_message(operation); }, operation.peer,
          Clock::now());
}

void WireBackend::submit_message(const WorkPtr& work, Deadline deadline) {
  const Operation& operation = work->operations()[0];
  check();
  const auto began = Clock::now();
  std::shared_ptr<MessageTransfer> transfer;
  guarded([&] { transfer = post(operation); }, [&] { return describe_message(operation); }, operation.peer, began);
  complete_on_a_thread(work, std::move(transfer), deadline, began);
}

Backend::Taken WireBackend::take_message(const Operation& receive, int) {
  check();
  require_possible(receive);
  const auto began = Clock::now();
  const auto what = [&] { return describe_message(receive); };
  Envelope header;
  int source = kAnySource;
  std::vector<int> gone;
  std::optional<int> lost;  // one of those that have not left in order
  guarded(
      [&] {
        gone = wire_->gone();  // first, so that take() finds all that they have sent
        for (const int r : gone)
          if (!lost && !has_departed(r)) lost = r;
        if (lost) return;
        source = wire_->take({WireKind::kMessage, static_cast<uint32_t>(receive.tag)},
                             reinterpret_cast<std::byte*>(&header), sizeof header);
      },
      what, kAnySource, began);
  if (lost) diagnose_failure(what(), false, "its connection ended", *lost, began);
  if (source == kAnySource) return {.all_gone = !others_.empty() && gone.size() >= others_.size()};
  const WorkPtr work = make_message_work(receive);
  complete_on_a_thread(work, std::make_shared<MessageTransfer>(*this, work->operations()[0], header, source),
                       deadline_for(receive.timeout), began);
  return {.work = work, .source = source};
}

// Whether rank `r`, whose connection has ended, has left a group that works. Otherwise it is lost, and the group with
// it, also for a rank that waits for no particular other.
bool WireBackend::has_departed(int r) {
  {
    const std::lock_guard lock(state_mutex_);
    if (departed_.count(r)) return true;
  }
  try {
    const store::CallsBy soon(Deadline::after(kNotes));  // both calls together
    if (store_->try_get(key(kCause)) || !has_left(r)) return false;
  } catch (const std::exception&) {
    return false;  // the store has gone with its rank, or is as good as gone
  }
  const std::lock_guard lock(state_mutex_);
  departed_.insert(r);
  return true;
}

void WireBackend::complete_on_a_thread(const WorkPtr& work, std::shared_ptr<MessageTransfer> transfer,
                                       Deadline deadline, Clock::time_point began) {
  const auto finish = [this, work, transfer, deadline, began] {
    const Operation& message = work->operations()[0];
    std::exception_ptr error;
    try {
      int peer = message.peer;
      guarded([&] { peer = transfer->wait(deadline); }, [&] { return describe_message(message); }, message.peer, began);
      count(message);
      if (message.kind == OpKind::kRecv) work->set_source(peer);
    } catch (...) {
      error = std::current_exception();
    }
    work->complete(std::move(error));
  };
  try {
    wait_on_a_thread(finish);
  } catch (const Unavailable& error) {
    // A part of the message is on its way already, so the peer would wait for the rest.
    fail_group(
        Unavailable(text("rank ", shown(getRank()), " cannot move its messages: ", error.message()), error.advice()));
    check();
  }
}

// A wire's transfers cannot be polled, and one thread can wait for only one of them. So each message under way has a
// thread.
void WireBackend::wait_on_a_thread(std::function<void()> job) {
  std::unique_lock lock(threads_mutex_);
  if (stop_threads_) {  // the wire is closed: nothing waits for long
    lock.unlock();
    return job();
  }
  jobs_.push_back(std::move(job));
  job_.notify_one();
  if (idle_ >= jobs_.size()) return;
  try {
    threads_.push_back(start_thread("muster-message", [this] { work_on_jobs(); }));
  } catch (const Unavailable&) {
    const auto unstarted = std::move(jobs_.back());  // released without the lock: it may hold objects of the user
    jobs_.pop_back();
    lock.unlock();
    throw;
  }
}

void WireBackend::on_a_thread_or_here(const std::function<void()>& job) {
  try {
    wait_on_a_thread(job);
  } catch (const Unavailable&) {
    job();
  }
}

void WireBackend::work_on_jobs() {
  std::shared_ptr<void> alive;  // released last
  std::unique_lock mine(threads_mutex_);
  for (;;) {
    ++idle_;
    job_.wait(mine, [this] { return stop_threads_ || !jobs_.empty(); });
    --idle_;
    if (jobs_.empty()) return;
    auto next = std::move(jobs_.front());
    jobs_.pop_front();
    mine.unlock();
    if (!alive) alive = memory();
    next();
    next = nullptr;  // without the lock, because this may release objects of the user
    mine.lock();
  }
}

}  // namespace muster::comm
