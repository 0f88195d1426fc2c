#include "base/crash_report.h"

#include <dlfcn.h>
#include <execinfo.h>
#include <link.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace muster {
namespace {

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
constexpr int kMaxFrames = 64;
constexpr size_t kStackBytes = 256 * 1024;  // for the unwinder, and a sanitizer's or MPI's handler after ours
constexpr unsigned kPatience = 5;           // seconds
constexpr uintptr_t kGuardReach = 1 << 20;  // a function with large variables may reach this far beyond the stack

char program[4096];             // of the main program, whose name in the linker's list is empty
std::atomic<int> reporting{0};  // the thread that reports

pid_t this_thread() { return static_cast<pid_t>(::syscall(SYS_gettid)); }

// A line, written as a whole and cut to what fits; no memory is allocated.
class Line {
 public:
  Line& operator<<(std::string_view words) {
    const size_t size = std::min(words.size(), sizeof text_ - 1 - size_);
    std::memcpy(text_ + size_, words.data(), size);
    size_ += size;
    return *this;
  }
  Line& number(uint64_t value, unsigned base) {
    char digits[24];
    size_t at = sizeof digits;
    do digits[--at] = "0123456789abcdef"[value % base];
    while ((value /= base) != 0);
    return *this << std::string_view(digits + at, sizeof digits - at);
  }
  Line& hex(uintptr_t value) { return (*this << "0x").number(value, 16); }
  void write() {
    text_[size_++] = '\n';
    size_t done = 0;
    while (done < size_) {
      const ssize_t written = ::write(STDERR_FILENO, text_ + done, size_ - done);
      if (written <= 0) break;
      done += static_cast<size_t>(written);
    }
    size_ = 0;
  }

 private:
  char text_[1024];
  size_t size_ = 0;
};

std::string_view name_of(int signal) {
  switch (signal) {
    case SIGSEGV:
      return "SIGSEGV";
    case SIGBUS:
      return "SIGBUS";
    case SIGILL:
      return "SIGILL";
    case SIGFPE:
      return "SIGFPE";
    default:
      return "SIGABRT";
  }
}

struct Registers {
  uintptr_t pc = 0, sp = 0;
};
Registers registers_of([[maybe_unused]] const void* context) {
#if defined(__x86_64__)
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
  return {static_cast<uintptr_t>(machine.gregs[REG_RIP]), static_cast<uintptr_t>(machine.gregs[REG_RSP])};
#elif defined(__aarch64__)
  const auto& machine = static_cast<const ucontext_t*>(context)->uc_mcontext;
  return {machine.pc, machine.sp};
#else
  return {};
#endif
}

#if __GLIBC_PREREQ(2, 35)
constexpr bool kKnowsObjects = true;
#else
constexpr bool kKnowsObjects = false;
#endif

// The program or library that has this address; null if the address belongs to no file, or the C library cannot tell.
const link_map* object_of([[maybe_unused]] uintptr_t address) {
#if __GLIBC_PREREQ(2, 35)
  dl_find_object object{};
  if (::_dl_find_object(reinterpret_cast<void*>(address), &object) == 0) return object.dlfo_link_map;
#endif
  return nullptr;
}

void print_frame(uintptr_t address) {
  const link_map* const object = object_of(address);
  const char* name = !object ? "?" : object->l_name && *object->l_name ? object->l_name : program;
  Line line;
  (line << "muster: stack: " << name << " +").hex(address - (object ? object->l_addr : 0)).write();
}

void print_stack(const Registers& at) {
  print_frame(at.pc);
  if (kKnowsObjects && !object_of(at.pc)) {
    // The thread jumped to where there is no code. The unwinder would look for code there, and die too. The return
    // address on the stack says where the jump came from.
#if defined(__x86_64__)
    if (at.sp % sizeof(uintptr_t) == 0 && at.sp != 0) print_frame(*reinterpret_cast<const uintptr_t*>(at.sp) - 1);
#endif
    return;
  }
  void* frames[kMaxFrames];
  const int count = ::backtrace(frames, kMaxFrames);
  // The first frames are ours and the kernel's; the thread's own begin with the failing instruction.
  int first = 0;
  while (first < count && reinterpret_cast<uintptr_t>(frames[first]) != at.pc) ++first;
  // A return address is behind the call: the instruction before it made the call.
  for (int i = first + 1; i < count; ++i) print_frame(reinterpret_cast<uintptr_t>(frames[i]) - 1);
}

void report(int signal, const siginfo_t& info, const void* context) {
  const Registers at = registers_of(context);
  const auto address = reinterpret_cast<uintptr_t>(info.si_addr);
  Line line;
  (line << "muster: " << name_of(signal) << " (").number(static_cast<uint64_t>(signal), 10) << ")";
  if (signal != SIGABRT && info.si_code > 0) (line << " at address ").hex(address);
  if (info.si_code == SI_USER) (line << ", sent by process ").number(static_cast<uint64_t>(info.si_pid), 10);
  if (signal == SIGSEGV && info.si_code > 0 && at.sp != 0 &&
      (address < at.sp ? at.sp - address : address - at.sp) < kGuardReach)
    line << ", the end of its stack";
  char thread[16] = {};
  ::syscall(SYS_prctl, 16 /* PR_GET_NAME */, thread);
  (line << ", in thread ").number(static_cast<uint64_t>(this_thread()), 10) << " '" << thread << "'";
  line.write();
  print_stack(at);
}

void handle(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  int nobody = 0;
  if (reporting.compare_exchange_strong(nobody, this_thread())) {
    ::signal(SIGALRM, SIG_DFL);
    sigset_t alarm;
    ::sigemptyset(&alarm);
    ::sigaddset(&alarm, SIGALRM);
    ::pthread_sigmask(SIG_UNBLOCK, &alarm, nullptr);
    ::alarm(kPatience);
    report(signal, *info, context);
  } else if (nobody != this_thread()) {
    for (;;) ::pause();  // the report of another thread's fault ends the process
  }
  struct sigaction action {};
  action.sa_handler = SIG_DFL;
  ::sigaction(signal, &action, nullptr);
  // A fault recurs when its instruction is executed again. A signal that was sent must be sent again; it takes effect
  // when this handler returns.
  if (info->si_code <= 0) ::syscall(SYS_tgkill, ::getpid(), this_thread(), signal);
  errno = saved;
}

}  // namespace

void install_crash_report() {
  static std::atomic<bool> installed{false};
  const char* wanted = std::getenv(kCrashReportVariable);
  if ((wanted && std::string_view(wanted) == "0") || installed.exchange(true)) return;
  const ssize_t size = ::readlink("/proc/self/exe", program, sizeof program - 1);
  if (size < 0) std::strcpy(program, "?");
  void* frames[2];
  ::backtrace(frames, 2);  // loads the unwinder now, because that takes locks and memory

  stack_t stack{};
  if (::sigaltstack(nullptr, &stack) == 0 && (stack.ss_flags & SS_DISABLE) != 0) {
    // Never freed: the kernel uses it until the thread ends.
    void* memory = ::mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (memory != MAP_FAILED) {
      stack = {.ss_sp = memory, .ss_flags = 0, .ss_size = kStackBytes};
      ::sigaltstack(&stack, nullptr);
    }
  }
  for (const int signal : kSignals) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) != 0 || (action.sa_flags & SA_SIGINFO) != 0 ||
        action.sa_handler != SIG_DFL)
      continue;
    action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigemptyset(&action.sa_mask);
    ::sigaction(signal, &action, nullptr);
  }
}

}  // namespace muster
