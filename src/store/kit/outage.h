// How a client of a store handles the time in which the store does not answer.
//
//   comes_again       Whether the store may come back with its data. A store that others run (an etcd) may; a store
//                     that a process of the job serves ends with that process.
//   set_call_timeout  How long calls that take no deadline (set, try_get, add, …) wait for their answer; the default is
//                     a minute. A client that calls often, such as a launcher that beats twice per second, thereby
//                     notices a silent store without extra messages.
//   CallsBy           A common deadline for the next calls of one thread. One use is the notes that a process leaves
//                     when it ends or has lost its peers: others would like to read them, but the process must not
//                     wait for a store that ended with its peers. Another use is one attempt of several.
//
// Thread-safety: all functions. A new timeout applies to calls that begin later. A CallsBy belongs to its thread.
#pragma once

#include <chrono>

#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::store {

// The timeout of calls that take no deadline, unless set_call_timeout() has set another one.
inline constexpr std::chrono::milliseconds kCallTimeout{60'000};

// A store whose server may be unreachable.
class Outage {
 public:
  virtual ~Outage() = default;
  virtual bool comes_again() const = 0;
  virtual void set_call_timeout(std::chrono::milliseconds timeout) = 0;
};

// Also false for a store in the memory of this process.
inline bool comes_again(const Store& store) {
  const auto* const able = dynamic_cast<const Outage*>(&store);
  return able && able->comes_again();
}

inline void set_call_timeout(Store& store, std::chrono::milliseconds timeout) {
  if (auto* const able = dynamic_cast<Outage*>(&store)) able->set_call_timeout(timeout);
}

// While it lives, calls of this thread that take no deadline end by this deadline, whatever their store's own timeout
// is. With kNote, if the store was silent at the last call, a call only takes the time to ask whether it is back; with
// kTry, a call has all the time. Scopes nest: the earliest deadline counts, and kTry inside kNote counts as kNote.
class CallsBy {
 public:
  enum class For { kNote, kTry };
  explicit CallsBy(Deadline deadline, For what = For::kNote);
  ~CallsBy();
  CallsBy(const CallsBy&) = delete;
  CallsBy& operator=(const CallsBy&) = delete;

  static Deadline of_this_thread();              // never() if this thread has no CallsBy
  static Deadline of_this_thread(Deadline own);  // the earlier one of that and `own`, the store's deadline
  static bool is_for_note();                     // whether a CallsBy of this thread is kNote

 private:
  const Deadline before_;
  const bool note_before_;
};

}  // namespace muster::store
