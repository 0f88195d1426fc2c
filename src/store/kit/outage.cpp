#include "store/kit/outage.h"

namespace muster::store {
namespace {

Deadline& current() {
  thread_local Deadline deadline = Deadline::never();
  return deadline;
}

bool& note() {
  thread_local bool is_note = false;
  return is_note;
}

}  // namespace

CallsBy::CallsBy(Deadline deadline, For what) : before_(current()), note_before_(note()) {
  current() = of_this_thread(deadline);
  note() = note_before_ || what == For::kNote;
}

CallsBy::~CallsBy() {
  current() = before_;
  note() = note_before_;
}

bool CallsBy::is_for_note() { return note(); }

Deadline CallsBy::of_this_thread() { return current(); }

Deadline CallsBy::of_this_thread(Deadline own) { return current().when() < own.when() ? current() : own; }

}  // namespace muster::store
