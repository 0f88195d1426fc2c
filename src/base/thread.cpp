#include "base/thread.h"

#include <pthread.h>
#include <atomic>
#include <system_error>

#include "base/signals_blocked.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
std::thread start_thread(const std::string& name, std::function<void()> body) {
  const SignalsBlocked blocked;  // inherited by the new thread; undone here even if no thread can be started
  try {
    std::thread thread(std::move(body));
    pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
    return thread;
  } catch (const std::system_error& error) {
    throw Unavailable(text("cannot start thread '", name, "': ", error.what()),
                      "Raise the limits on processes (ulimit -u) and on memory (ulimit -v)");
  }
}

void join_or_detach(std::thread& thread) {
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

namespace {
std::atomic<void* (*)()> release_interpreter{nullptr};
std::atomic<void (*)(void*)> retake_interpreter{nullptr};
}  // namespace

void set_interpreter_lock(void* (*release)(), void (*retake)(void* held)) {
  retake_interpreter = retake;
  release_interpreter = release;
}

WithoutInterpreterLock::WithoutInterpreterLock()
    : held_(release_interpreter.load() != nullptr ? release_interpreter.load()() : nullptr) {}
WithoutInterpreterLock::~WithoutInterpreterLock() {
  if (held_ != nullptr) retake_interpreter.load()(held_);
}

}  // namespace muster
