#include "comm/backends/mpi/engine.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "base/signals_blocked.h"
#include "base/text.h"

namespace muster::comm::mpi_backend {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

// How long a peer may take to answer while MPI still uses memory.
constexpr milliseconds kAnswer{2000};
// Between two looks of the engine's thread.
constexpr milliseconds kOften{1}, kSeldom{20};
constexpr const char *kClosed = "the group is closed", *kGone = "the peer has left the group";
constexpr unsigned kLooks = 32;  // only one of this many looks of a waiter checks for goodbyes

void wait_until(std::condition_variable& condition, Lock& lock, Clock::time_point until) {
  if (until == Clock::time_point::max())
    condition.wait(lock);
  else
    condition.wait_until(lock, until);
}

}  // namespace

std::string describe(int mpi_error) {
  char text[MPI_MAX_ERROR_STRING] = {};
  int length = 0;
  MPI_Error_string(mpi_error, text, &length);
  return {text, static_cast<size_t>(length)};
}

Backoff::Step Backoff::next() {
  const auto since = Clock::now() - began_;
  if (since < spin_) return Step::kSpin;
  if (since < spin_ + kYield) return Step::kYield;
  nap_ = std::min(nap_ * 2, kLongest);
  return Step::kNap;
}

// --- the process's MPI ---

Engine& Engine::get(const WireContext& site) {
  static std::mutex mutex;
  static Engine* engine = nullptr;
  const std::lock_guard lock(mutex);
  if (!engine) engine = new Engine(site);
  const Lock mine = engine->lock();
  if (const char* const problem = engine->problem()) site.unavailable(problem, "Start the job again");
  return *engine;
}

Engine::Engine(const WireContext& site) : pid_(::getpid()) {
  int initialized = 0, finalized = 0, level = MPI_THREAD_SINGLE;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (finalized) site.unavailable("MPI has been finalized in this process", "Finalize it when no World is left");
  if (initialized) {
    MPI_Query_thread(&level);
  } else {
    if (const int error = MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level); error != MPI_SUCCESS)
      site.unavailable("MPI could not be initialised", "Look at what it says on standard error");
    ours_ = true;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
  }
  if (level < MPI_THREAD_SERIALIZED)
    site.unavailable("MPI serves only one thread in this process",
                     initialized ? "Initialise it by MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave that to Muster"
                                 : "Use an MPI that was built for threads");
  threads_may_call_ = level >= MPI_THREAD_MULTIPLE;
  int* most = nullptr;
  int known = 0;
  MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, &most, &known);
  if (!known || *most < static_cast<int>(kWireTags - 1))
    site.unavailable(text("this MPI has tags up to ", known ? *most : 0, ", but Muster needs ", kWireTags - 1),
                     "Use another MPI or backend");
  ::on_exit(&at_exit, this);
  int key = MPI_KEYVAL_INVALID;
  MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, &at_finalize, &key, this);
  MPI_Comm_set_attr(MPI_COMM_SELF, key, this);  // MPI_Finalize begins by deleting it
  const SignalsBlocked blocked;                 // signals are for the program's own threads
  thread_ = std::thread([this] { run_thread(); });
  pthread_setname_np(thread_.native_handle(), "muster-mpi");
}

void Engine::stop() {
  {
    const Lock mine = lock();
    finalized_ = true;
    for (const auto& group : groups_) wake(*group);
    thread_wakes_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

int Engine::at_finalize(MPI_Comm, int, void* engine, void*) {
  static_cast<Engine*>(engine)->stop();
  return MPI_SUCCESS;
}

void Engine::at_exit(int status, void* engine) {
  auto& self = *static_cast<Engine*>(engine);
  if (!self.owns()) return;
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (finalized) return;
  if (status == 0 && self.ours_ && !self.poisoned_)
    MPI_Finalize();
  else
    self.stop();
}

bool Engine::owns() const { return pid_ == ::getpid(); }

const char* Engine::problem() const {
  if (poisoned_)
    return "a rank did not answer while a message was under way, so MPI is not used any more in this process";
  return finalized_ ? "MPI has been finalized in this process" : nullptr;
}

Lock Engine::lock() {
  ++wanting_;
  Lock mine(mutex_);
  --wanting_;
  return mine;
}

// --- progress ---

void Engine::test(Request& request) {
  if (request.done_) return;
  int done = 0;
  MPI_Status status;
  const int error = MPI_Test(&request.handle_, &done, &status);
  if (done || error != MPI_SUCCESS) request.finish(status, error);
}

void Engine::look(bool thoroughly) {
  if (problem()) return;
  if (waiting_.size() == 1) {
    test(*waiting_[0]);
  } else if (!waiting_.empty()) {
    const size_t n = waiting_.size();
    handles_.resize(n), statuses_.resize(n), indices_.resize(n);
    for (size_t i = 0; i < n; ++i) handles_[i] = waiting_[i]->handle_;
    int done = 0;
    const int error = MPI_Testsome(static_cast<int>(n), handles_.data(), &done, indices_.data(), statuses_.data());
    if (error == MPI_SUCCESS || error == MPI_ERR_IN_STATUS)
      for (int i = 0; done != MPI_UNDEFINED && i < done; ++i) {
        const auto place = static_cast<size_t>(indices_[static_cast<size_t>(i)]);
        const MPI_Status& status = statuses_[static_cast<size_t>(i)];
        waiting_[place]->handle_ = handles_[place];
        waiting_[place]->finish(status, error == MPI_SUCCESS ? MPI_SUCCESS : status.MPI_ERROR);
        if (waiting_[place] != driver_) waiting_[place]->changed_.notify_one();
      }
  }
  if (!thoroughly && ++looks_ % kLooks != 0) return;
  for (const auto& group : groups_) receive_notes(*group);
  groups_.remove_if([this](const auto& group) { return finished(*group); });
}

// What the driver does between two looks.
void Engine::pause(Lock& lock, Request& request, Backoff& backoff, Clock::time_point until) {
  const auto step = backoff.next();
  if (step == Backoff::Step::kNap) {
    driver_naps_ = true;
    request.changed_.wait_until(lock, std::min(until, Clock::now() + backoff.nap()));
    if (driver_ == &request) driver_naps_ = false;
    return;
  }
  if (step == Backoff::Step::kSpin && wanting_ == 0) return;
  lock.unlock();
  int tries = 0;
  do ::sched_yield();
  while (wanting_ != 0 && ++tries < 1000);
  lock.lock();
}

bool Engine::await(Lock& lock, Request& request, Deadline deadline) {
  if (!request.done_ && !problem()) test(request);
  if (request.done_) return true;
  struct Place {  // among those who wait
    Engine& engine;
    Request& request;
    Place(Engine& engine, Request& request) : engine(engine), request(request) { engine.waiting_.push_back(&request); }
    ~Place() {
      auto& waiting = engine.waiting_;
      waiting.erase(std::find(waiting.begin(), waiting.end(), &request));
      if (engine.driver_ == &request) engine.driver_ = nullptr;
      if (!engine.driver_ && !waiting.empty()) waiting.front()->changed_.notify_one();
    }
  } const place(*this, request);
  request.began_ = Clock::now();
  Backoff backoff(request.group_->spin);
  while (!request.done_) {
    if (const char* const why = request.failure_reason()) throw WireBroken(why);
    if (deadline.passed()) return false;
    const auto until = std::min(deadline.when(), request.look_again_);
    if (!driver_ || (driver_ != &request && driver_naps_)) {
      driver_ = &request;
      driver_naps_ = false;
      backoff.reset();
    }
    if (driver_ != &request) {
      wait_until(request.changed_, lock, until);
      continue;
    }
    look(backoff.naps());
    if (!request.done_) pause(lock, request, backoff, until);
  }
  return true;
}

// Short messages are in MPI's memory when they are found, so the receive does not wait.
int Engine::take(Lock&, MpiGroup& group, WireTag tag, std::byte* data, size_t bytes) {
  if (const char* const why = problem()) throw WireBroken(why);
  if (group.closed) throw WireBroken(kClosed);
  int there = 0;
  MPI_Message message = MPI_MESSAGE_NULL;
  MPI_Status status;
  MPI_Comm comm = group.comms[static_cast<size_t>(tag.kind)];
  int error = MPI_Improbe(MPI_ANY_SOURCE, static_cast<int>(tag.value), comm, &there, &message, &status);
  if (error == MPI_SUCCESS && there) error = MPI_Mrecv(data, static_cast<int>(bytes), MPI_BYTE, &message, &status);
  if (error != MPI_SUCCESS) throw WireBroken(describe(error));
  if (!there) {
    if (++looks_ % kLooks == 0) receive_notes(group);
    return -1;
  }
  ++group.peers[static_cast<size_t>(status.MPI_SOURCE)].received;
  return status.MPI_SOURCE;
}

void Engine::abandon(Lock& lock, Request& request) {
  MpiGroup& group = *request.group_;
  const auto forget = [&] {
    group.holds_requests = true;
    group.unfinished.erase(&request);
    request.done_ = true;
  };
  if (problem()) return forget();
  test(request);
  if (!request.done_ && !request.sending_) {
    MPI_Cancel(&request.handle_);
    test(request);
  }
  if (request.done_) return;
  close(lock, group);  // which tells the peer
  const auto began = Clock::now();
  const bool own = request.peer_ == group.rank;
  for (const auto answer = Deadline::after(kAnswer); !problem();) {
    test(request);
    if (request.done_) return;
    receive_notes(group);
    if (request.sending_) {
      const auto& peer = group.peers[static_cast<size_t>(request.peer_)];
      const auto settled = [](bool it_is, Clock::time_point since) {
        return it_is && Clock::now() - since >= kLateEnd;
      };
      if (settled(peer.gone, peer.gone_at) || settled(peer.acknowledged, peer.acknowledged_at) || settled(own, began))
        break;
    }
    if (answer.passed()) {
      poisoned_ = true;
      for (const auto& other : groups_) wake(*other);
    }
    lock.unlock();
    std::this_thread::sleep_for(microseconds(100));
    lock = this->lock();
  }
  forget();
}

void Engine::run_thread() {
  Lock mine = lock();
  auto interval = kOften;
  while (!finalized_) {
    if (groups_.empty())
      thread_wakes_.wait(mine);
    else
      thread_wakes_.wait_for(mine, interval);
    interval = std::exchange(posted_, false) ? kOften : std::min(interval * 2, kSeldom);
    if (!driver_) look(true);
  }
}

// --- transfers ---

int Request::wait(Deadline deadline) {
  bool complete = false;
  {
    Lock lock = engine_.lock();
    complete = engine_.await(lock, *this, deadline);
  }
  if (!complete) group_->timeout();
  if (error_ != MPI_SUCCESS) throw WireBroken(describe(error_));
  return source_;
}

Request::~Request() {
  if (!posted_ || !engine_.owns()) return;
  Lock lock = engine_.lock();
  if (!done_) engine_.abandon(lock, *this);
}

void Request::finish(const MPI_Status& status, int error) {
  done_ = true;
  error_ = error;
  group_->unfinished.erase(this);
  int cancelled = 0;
  if (error == MPI_SUCCESS && !sending_) MPI_Test_cancelled(&status, &cancelled);
  if (error != MPI_SUCCESS || cancelled) return;
  source_ = sending_ ? peer_ : status.MPI_SOURCE;
  auto& peer = group_->peers[static_cast<size_t>(source_)];
  ++(sending_ ? peer.sent : peer.received);
}

const char* Request::refused() const {
  if (const char* const problem = engine_.problem()) return problem;
  if (group_->closed) return kClosed;
  if (peer_ == group_->rank) return nullptr;
  uint64_t sent = 0, received = 0;
  bool more_may_come = false;
  for (int r = 0; r < group_->size; ++r) {
    const auto& peer = group_->peers[static_cast<size_t>(r)];
    if (r == group_->rank || (peer_ >= 0 && r != peer_)) continue;
    if (peer.gone && (sending_ || peer.abandoned.count(code_) || peer.abandoned.count(kEverything))) return kGone;
    more_may_come = more_may_come || !peer.gone;
    sent += peer.gone ? peer.sent_to_us : 0;
    received += peer.received;
  }
  return !sending_ && !more_may_come && received >= sent ? kGone : nullptr;
}

const char* Request::failure_reason() {
  look_again_ = Clock::time_point::max();
  if (const char* const problem = engine_.problem()) return problem;
  if (group_->closed) return kClosed;
  const bool anybody = peer_ < 0;
  if (anybody ? !group_->all_gone() : !group_->peers[static_cast<size_t>(peer_)].gone) return nullptr;
  uint64_t sent = 0, received = 0;
  Clock::time_point since = began_;
  bool in_vain = sending_;
  for (int r = 0; r < group_->size; ++r) {
    if (r == group_->rank || (!anybody && r != peer_)) continue;
    const auto& peer = group_->peers[static_cast<size_t>(r)];
    sent += peer.sent_to_us;
    received += peer.received;
    since = std::max(since, peer.gone_at);
    in_vain = in_vain || peer.abandoned.count(code_) || peer.abandoned.count(kEverything);
  }
  if (!sending_ && received >= sent) return kGone;
  look_again_ = since + (in_vain ? kLateEnd : kLateMessage);
  return Clock::now() >= look_again_ ? kGone : nullptr;
}

}  // namespace muster::comm::mpi_backend
