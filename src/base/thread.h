// Threads of the library: named for debuggers, and with all signals blocked, because signals belong to the program's
// own threads.
#pragma once

#include <functional>
#include <string>
#include <thread>

namespace muster {

// `name`: at most 15 characters; longer names are cut. Unavailable if the system starts no more threads.
std::thread start_thread(const std::string& name, std::function<void()> body);

// Waits until `thread` has ended, if there is one. If it is the calling thread, detaches it instead: then it must soon
// end by itself, and whatever it still uses must live as long.
void join_or_detach(std::thread& thread);

// A thread that waits for another must not hold what the other needs. An interpreter's lock is such a thing: Python
// destroys objects with its lock held, and what a thread of Muster releases may be Python's. `release` releases the
// calling thread's hold on the lock, and returns what `retake` needs, or null if the thread has none. Call it before
// any other thread uses Muster.
void set_interpreter_lock(void* (*release)(), void (*retake)(void* held));

class WithoutInterpreterLock {
 public:
  WithoutInterpreterLock();
  ~WithoutInterpreterLock();
  WithoutInterpreterLock(const WithoutInterpreterLock&) = delete;
  WithoutInterpreterLock& operator=(const WithoutInterpreterLock&) = delete;

 private:
  void* const held_;
};

}  // namespace muster
