#include "base/thread.h"

#include <pthread.h>

#include "base/signals_blocked.h"

namespace muster {
std::thread start_thread(const std::string& name, std::function<void()> body) {
  const SignalsBlocked blocked;  // inherited by the new thread; undone here even if no thread can be started
  std::thread thread(std::move(body));
  pthread_setname_np(thread.native_handle(), name.substr(0, 15).c_str());
  return thread;
}

void join_or_detach(std::thread& thread) {
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

}  // namespace muster
