// What a client wants to know and to say about the time in which its store does not answer.
//
//   comes_again       A store that others keep (an etcd) may be away for a while and then be there as before. One that
//                     a process of the job serves ends with that process.
//   set_call_timeout  How long the calls wait for their answer that take no deadline (set, try_get, add, …): a minute
//                     unless somebody says otherwise. Whoever calls often, as a launcher that beats twice a second, so
//                     has a heartbeat of the store for nothing.
//   CallsBy           How long one thread bears it now, in all: for notes that others would like to have, from a
//                     process that ends or has lost its peers, and must not wait for a store that went with them. Or
//                     for one try of several.
//
// Thread-safety: all of it. A new time counts for calls that begin later. A CallsBy belongs to its thread.
#pragma once

#include <chrono>

#include "muster/base/deadline.h"
#include "muster/store/store.h"

namespace muster::store {

// For calls that take no deadline, where nobody has set another.
inline constexpr std::chrono::milliseconds kCallTimeout{60'000};

// A store whose server may be away.
class Outage {
 public:
  virtual ~Outage() = default;
  virtual bool comes_again() const = 0;
  virtual void set_call_timeout(std::chrono::milliseconds timeout) = 0;
};

// False for a store in the memory of this process, too.
inline bool comes_again(const Store& store) {
  const auto* const able = dynamic_cast<const Outage*>(&store);
  return able && able->comes_again();
}

inline void set_call_timeout(Store& store, std::chrono::milliseconds timeout) {
  if (auto* const able = dynamic_cast<Outage*>(&store)) able->set_call_timeout(timeout);
}

// While it lives, the calls of this thread that take no deadline end by this one, whatever their store's own time is.
// For a note, a store that was silent the last time is only asked whether it is back; a try has the whole of its time.
// Scopes nest; the earliest deadline counts, and what is tried for a note is a note.
class CallsBy {
 public:
  enum class For { kNote, kTry };
  explicit CallsBy(Deadline deadline, For what = For::kNote);
  ~CallsBy();
  CallsBy(const CallsBy&) = delete;
  CallsBy& operator=(const CallsBy&) = delete;

  static Deadline of_this_thread();              // never() where there is none
  static Deadline of_this_thread(Deadline own);  // of that and a store's own, the earlier
  static bool is_for_note();                     // in this thread

 private:
  const Deadline before_;
  const bool note_before_;
};

}  // namespace muster::store
