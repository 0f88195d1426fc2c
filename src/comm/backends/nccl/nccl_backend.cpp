#include "comm/backends/nccl/nccl_backend.h"

#ifdef MUSTER_HAS_NCCL

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "comm/backends/nccl/nccl_calls.h"
#include "comm/backends/registry.h"
#include "comm/kit/operation_record.h"
#include "comm/kit/queued_backend.h"
#include "muster/base/deadline.h"
#include "muster/store/c10d_store.h"

namespace muster::comm::nccl_backend {
namespace {

bool is_on_cpu(const Operation& operation) {
  bool on_cpu = true;  // also a barrier, which has no tensor
  for_each_tensor(operation, [&](const at::Tensor& tensor) { on_cpu &= !tensor.is_cuda(); });
  return on_cpu;
}

// Its collectives have numbers of their own, so in the black box they are those of a group of their own.
OperationLog log_of(BackendContext context) {
  context.group.name += " (CUDA)";
  return OperationLog(context);
}

// Those of the devices that this process has used.
void wait_for_current_streams() {
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  for (c10::DeviceIndex i = 0; i < cuda.deviceCount(); ++i)
    if (at::detail::getCUDAHooks().hasPrimaryContext(i)) cuda.synchronizeStream(cuda.getStream({at::kCUDA, i}));
}

bool is_collective(const Operation& operation) {
  return operation.kind != OpKind::kSend && operation.kind != OpKind::kRecv;
}

std::string first_line(const std::string& words) { return words.substr(0, words.find('\n')); }

class NcclBackend final : public Backend {
 public:
  NcclBackend(const BackendContext& context, c10::intrusive_ptr<Backend> cpu, c10::intrusive_ptr<Nccl> nccl)
      : Backend(context.group.rank, context.group.size),
        cpu_(std::move(cpu)),
        nccl_(std::move(nccl)),
        group_name_(context.group.name),
        timeout_(context.group.timeout),
        on_leave_(context.options.on_leave),
        log_(log_of(context)) {
    for_pytorch_ = context.options.for_pytorch;
    if (getSize() > 1) guard_ = start_thread("muster-nccl", [this] { watch_for_failure(); });
  }
  ~NcclBackend() override {
    leave({});
    if (aborted_) nccl_.release();  // libtorch's destructor would wait for its thread, which waits for lost operations
  }

  bool run_small(const SmallCall& call) override {
    const bool on_cpu = call.tensor && call.tensor->defined() && call.tensor->is_cpu() &&
                        !(call.other && call.other->defined() && call.other->is_cuda());
    return on_cpu && cpu_->run_small(call);
  }
  void run(const Operation& operation) override {
    if (operation.kind == OpKind::kBarrier) wait_for_current_streams();
    if (is_on_cpu(operation)) return cpu_->run(operation);
    submit(operation)->wait();
  }
  WorkPtr submit(Operation operation) override {
    if (is_on_cpu(operation)) return cpu_->submit(std::move(operation));
    check(operation);
    return queue(to_string(operation.kind), {&operation, 1}, [&](Contiguous& contiguous) {
      if (is_collective(operation)) meet();
      return queue_on(*nccl_, operation, contiguous);
    });
  }
  WorkPtr submit_batch(std::vector<Operation> operations) override {
    if (operations.empty()) throw InvalidArgument("a batch of operations is empty");
    if (std::all_of(operations.begin(), operations.end(), is_on_cpu)) return cpu_->submit_batch(std::move(operations));
    require_one_device(operations);
    for (const Operation& operation : operations)
      if (!is_on_cpu(operation)) check(operation);  // before the first is queued
    WorkPtr last;  // the operations are on one stream, so all are complete when the last is
    for (auto& operation : operations) last = submit(std::move(operation));
    return last;
  }
  std::vector<WorkPtr> submit_messages(std::vector<Operation> messages) override {
    std::vector<WorkPtr> works(messages.size());
    std::vector<Operation> on_devices;
    for (const Operation& message : messages)
      if (!is_on_cpu(message)) on_devices.push_back(message);
    require_one_device(on_devices);  // all that refuses a message comes before the first is on its way
    for (const Operation& message : on_devices) check(message);
    for (size_t i = 0; i < messages.size(); ++i)
      if (is_on_cpu(messages[i])) works[i] = cpu_->submit(std::move(messages[i]));
    if (on_devices.empty()) return works;
    const WorkPtr work = queue("messages", on_devices, [&](Contiguous& contiguous) {
      WorkPtr all;
      std::exception_ptr failure;
      nccl_->startCoalescing();
      try {
        for (const Operation& message : on_devices) queue_on(*nccl_, message, contiguous);
      } catch (...) {
        failure = std::current_exception();
      }
      try {
        all = nccl_->endCoalescing();
      } catch (...) {
        if (!failure) failure = std::current_exception();
      }
      if (failure) std::rethrow_exception(failure);
      return all;
    });
    for (WorkPtr& each : works)
      if (!each) each = work;
    return works;
  }
  CommStats stats() const override {
    CommStats sum = counters_->stats();
    const CommStats more = cpu_->stats();
    sum.operations += more.operations;
    sum.bytes += more.bytes;
    sum.blocked += more.blocked;
    return sum;
  }
  const std::string& group_name() const override { return group_name_; }
  const Stragglers* stragglers() const override { return cpu_->stragglers(); }
  std::string straggler_report(std::chrono::nanoseconds at_least) const override {
    return cpu_->straggler_report(at_least);
  }
  std::span<std::atomic<uint64_t>> board() override { return cpu_->board(); }
  bool is_idle() const override { return cpu_->is_idle(); }
  std::exception_ptr known_failure() override { return cpu_->known_failure(); }
  Taken take_message(const Operation& receive, int from) override { return cpu_->take_message(receive, from); }
  std::chrono::milliseconds timeout() const override { return timeout_; }
  const std::string getBackendName() const override { return for_pytorch_ ? "muster" : "nccl"; }

  void leave(const std::string& cause) override {
    if (left_.exchange(true)) return;
    if (!cause.empty()) cpu_->leave(cause);  // first, so that peers need not wait for NCCL
    const bool is_over = cause.empty() && wait_for_last();
    stop_watching();
    end_communicators(/*abort=*/!is_over);
    if (cause.empty()) cpu_->leave(cause);
    if (on_leave_) on_leave_(this);
  }
  void fail(const Error& cause) override {
    cpu_->fail(cause);
    end_communicators(/*abort=*/true);
  }
  void abort() override {
    cpu_->abort();
    end_communicators(/*abort=*/true);
  }
  void shutdown() override { leave({}); }

 private:
  QueuedBackend& half() const { return static_cast<QueuedBackend&>(*cpu_); }  // create() has looked

  // Throws what has broken the group, as all backends say it.
  void throw_failure() const {
    half().check();
    if (half().failed()) cpu_->run({.kind = OpKind::kBarrier});  // throws it
  }
  void require_no_failure() const {
    half().check_fork();
    throw_failure();
    if (ended_) throw Aborted(text("group '", group_name_, "' is closing on rank ", getRank()));
  }

  void check(const Operation& operation) const {
    const auto fail = [&](const auto&... what) {
      throw InvalidArgument(text(to_string(operation.kind), ": ", what...));
    };
    at::Device device = at::kCPU;
    for_each_tensor(operation, [&](const at::Tensor& tensor) {
      if (device.is_cpu()) device = tensor.device();
      if (!tensor.is_cuda()) fail("a tensor is on ", tensor.device().str(), ", and another on a CUDA device");
      if (tensor.device() != device) fail("tensors are on ", device.str(), " and on ", tensor.device().str());
      if (tensor.layout() != at::kStrided) fail("a tensor is sparse, and NCCL takes dense tensors");
    });
    if (operation.kind == OpKind::kRecv && operation.peer == kAnySource)
      throw InvalidArgument("recv: NCCL does not receive from any rank", "Name the rank that sends");
    if (operation.peer < 0 || operation.peer >= getSize())
      fail("rank: expected 0 to ", getSize() - 1, " in a group of ", getSize(), ", got ", operation.peer);
  }

  static void require_one_device(const std::vector<Operation>& operations) {
    std::optional<at::Device> device;
    for (const Operation& operation : operations)
      for_each_tensor(operation, [&](const at::Tensor& tensor) {
        if (!device) device = tensor.device();
        if (tensor.device() != *device)
          throw InvalidArgument(text("a batch has tensors on ", device->str(), " and on ", tensor.device().str()),
                                "Submit them one by one");
      });
  }

  // Queues operations that check() allows and that have one work: start(contiguous) hands them to libtorch and returns
  // it. In the black box they are running until it has.
  template <typename Start>
  WorkPtr queue(std::string_view what, std::span<const Operation> operations, const Start& start) {
    require_no_failure();
    const std::lock_guard lock(mutex_);
    WorkRecord record(&log_, counters_, operations, collectives_);
    try {
      translated(what, [&] {
        Contiguous contiguous;
        last_ = start(contiguous);
        if (is_collective(operations[0])) ++collectives_;  // only now: libtorch may refuse it on one rank only
        contiguous.copy_back(*last_);
      });
    } catch (...) {
      record.end(std::current_exception());
      throw;
    }
    record.end(nullptr);
    for (const Operation& operation : operations) counters_->count(operation);
    return last_;
  }

  // With the mutex. Before NCCL's communicator is made.
  void meet() {
    if (has_met_ || getSize() == 1) return;
    cpu_->run({.kind = OpKind::kBarrier});
    has_met_ = true;
  }

  // Calls libtorch. Its errors of arguments become InvalidArgument; those of NCCL break the group.
  template <typename Fn>
  void translated(std::string_view what, const Fn& call) {
    try {
      call();
    } catch (const c10::DistBackendError& error) {
      require_no_failure();
      const Unavailable failure(text(what, " of group '", group_name_, "': ", first_line(error.what())));
      fail(failure);
      throw_failure();
      throw failure;  // of a rank that has left the group
    } catch (const c10::ValueError& error) {
      throw InvalidArgument(text(what, ": ", first_line(error.what_without_backtrace())));
    } catch (const c10::TypeError& error) {
      throw InvalidArgument(text(what, ": ", first_line(error.what_without_backtrace())));
    }
  }

  // Returns false if the group fails, or the timeout passes.
  bool wait_for_last() {
    const WorkPtr last = last_;
    const Deadline deadline = Deadline::after(timeout_);
    while (last && !last->isCompleted()) {
      if (half().failed() || deadline.passed()) return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return !half().failed();
  }

  // libtorch's shutdown() and abort() must not run twice, or both.
  void end_communicators(bool abort) {
    if (ended_.exchange(true)) return;
    aborted_ = abort;
    try {
      if (abort)
        nccl_->abort();
      else
        nccl_->shutdown();
    } catch (const std::exception& error) {
      aborted_ = true;
      MUSTER_LOG(kWarning) << "group '" << group_name_ << "': NCCL cannot end: " << first_line(error.what());
    }
  }

  void watch_for_failure() {
    constexpr std::chrono::milliseconds kEvery{100};
    std::unique_lock lock(watch_mutex_);
    while (!watch_wakes_.wait_for(lock, kEvery, [this] { return stop_watch_; })) {
      if (!half().failed()) continue;
      lock.unlock();
      return end_communicators(/*abort=*/true);
    }
  }
  void stop_watching() {
    {
      const std::lock_guard lock(watch_mutex_);
      stop_watch_ = true;
    }
    watch_wakes_.notify_all();
    if (guard_.joinable()) guard_.join();
  }

  const c10::intrusive_ptr<Backend> cpu_;
  c10::intrusive_ptr<Nccl> nccl_;
  const std::string group_name_;
  const std::chrono::milliseconds timeout_;
  const std::function<void(const Backend*)> on_leave_;
  const OperationLog log_;
  const std::shared_ptr<OperationCounters> counters_ = std::make_shared<OperationCounters>();
  std::mutex mutex_;          // held while libtorch queues an operation
  bool has_met_ = false;      // with the mutex
  uint64_t collectives_ = 0;  // with the mutex
  WorkPtr last_;              // with the mutex, until leave()
  std::atomic<bool> left_{false}, ended_{false}, aborted_{false};
  std::mutex watch_mutex_;
  std::condition_variable watch_wakes_;
  bool stop_watch_ = false;
  std::thread guard_;
};

}  // namespace

c10::intrusive_ptr<Backend> create(const BackendContext& context) {
  // Before libtorch reads them: to abort communicators and to go on, without a report for its own tools.
  static std::once_flag once;
  std::call_once(once, [] {
    ::setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2", /*overwrite=*/0);
    ::setenv("TORCH_NCCL_DUMP_ON_TIMEOUT", "0", /*overwrite=*/0);
  });
  const std::string name = context.options.inner.empty() ? "auto" : context.options.inner;
  BackendContext half = context;
  half.group.store_prefix += "/cpu";
  half.options.inner.clear();
  half.options.on_leave = nullptr;
  half.options.for_pytorch = false;
  auto cpu = create_backend(name, std::move(half));
  if (!dynamic_cast<QueuedBackend*>(cpu.get()))
    throw InvalidArgument(text("nccl:", name, " does not work: ", name, " does not take CPU tensors of all ranks"),
                          "Use nccl, nccl:gloo or nccl:mpi");
  const auto options = Nccl::Options::create();
  options->timeout = context.group.timeout;
  const auto store = to_c10d(make_prefix_store(context.group.store, context.group.store_prefix + "/nccl"));
  return c10::make_intrusive<NcclBackend>(
      context, std::move(cpu), c10::make_intrusive<Nccl>(store, context.group.rank, context.group.size, options));
}

std::string unavailable_reason() {
  return at::globalContext().hasCUDA() ? std::string() : "libtorch finds no CUDA device here";
}

}  // namespace muster::comm::nccl_backend

#else

namespace muster::comm::nccl_backend {

c10::intrusive_ptr<Backend> create(const BackendContext&) { throw Unavailable(unavailable_reason()); }
std::string unavailable_reason() {
  return "Muster was built without NCCL: use a libtorch with CUDA, install nccl.h and CUDA's headers, and build again";
}

}  // namespace muster::comm::nccl_backend

#endif
