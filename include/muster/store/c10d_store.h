// Bridges between Muster's Store and libtorch's c10d::Store, both ways.
//
// from_c10d() makes a Muster store of any store that libtorch or Python has: the TCPStore that torchrun serves, a
// FileStore, a store written in Python. c10d guarantees less than Muster does. The bridge makes up for the difference:
//
// - Waiting. A c10d client that waits holds the lock of its only connection, which blocks every other thread's call. So
//   the bridge never lets it wait: get(), wait() and watch() poll, after 1 ms at first, then after an eighth of the
//   time waited so far, 50 ms at most. A wait ends at most an eighth later than it could, and no thread blocks another.
// - set. TCPStore's set returns when it has sent, so another client might not see the value yet. The bridge then asks
//   whether the value is there; the server answers this after it has stored the value.
// - Versions. c10d has none. The bridge counts the changes that it makes itself and, for keys that are watched, those
//   that it sees when it polls. So a version is valid only for the bridge that gave it. Of several changes by other
//   clients between two polls, the bridge sees one; of a value that was changed and changed back, none. It always sees
//   the last state.
// - compare_set. c10d returns the final value, which does not say who stored it. So the bridge first stores an envelope
//   (a mark, a random token, the value), sees by the token whether it won, and then replaces the envelope by the plain
//   value. Bridges read through an envelope; other clients may see one for a moment, or forever if the process dies in
//   that moment. c10d does not distinguish "is absent" from "holds the empty string". The bridge reads first, so that
//   it can be wrong only if another client changes the key between the read and the exchange.
// - add and erase. What c10d's stores do with a value that is not a number, or with a key that is not there, is
//   undefined, so the bridge reads first here too: if two clients erase a key concurrently, both may be told that they
//   did. Do not use a key with both add() and compare_set().
// - Deadlines. c10d's calls have none. When a rank leaves a note in the store as it ends or fails, Muster makes the
//   call in a separate thread and waits for it for a limited time.
//
// to_c10d() makes a c10d::Store of a Muster store, for ProcessGroupGloo, NCCL and Python. It has c10d's semantics: an
// empty expected value means "absent", get() waits for the store's own timeout, a timeout of zero means none. It has
// the extended API (append, multiGet, multiSet), not the queues.
//
// Errors: from_c10d: c10::DistStoreError becomes TimeoutError, everything else that c10d throws Unavailable. to_c10d:
// TimeoutError becomes c10::DistStoreError, Unavailable c10::DistNetworkError, InvalidArgument c10::ValueError, the
// rest c10::DistError. Thread-safety: as Store; a thread that waits blocks no other. setTimeout() of to_c10d()'s store
// is as unsafe as c10d's.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <memory>

#include "muster/store/store.h"

namespace c10d {
class Store;
}

namespace muster {

std::shared_ptr<Store> from_c10d(c10::intrusive_ptr<c10d::Store> store);
c10::intrusive_ptr<c10d::Store> to_c10d(std::shared_ptr<Store> store);

}  // namespace muster
