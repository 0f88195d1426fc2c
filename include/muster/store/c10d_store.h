// Bridges between Muster's Store and libtorch's c10d::Store, both ways.
//
// from_c10d() makes a Muster store of anything that libtorch or Python has: the TCPStore that torchrun serves, a
// FileStore, a store written in Python. c10d promises less than Muster does; this is how the difference is made up:
//
// - Waiting. A c10d client that waits holds its one connection's lock, and every other thread's call with it. So the
//   bridge never lets it wait: get(), wait() and watch() ask again and again, after 1 ms at first, then after an eighth
//   of the time waited so far, 50 ms at most. A wait ends at most an eighth later than it could, and no thread blocks
//   another.
// - set. TCPStore's returns when it has sent, so another client might not see the value yet. The bridge asks whether it
//   is there, which the server answers after it.
// - Versions. c10d has none. The bridge counts the changes that it makes itself and, for keys that are watched, those
//   that it sees when it asks. So a version has a meaning only for the bridge that gave it; of several changes by
//   others between two looks one is seen; a value that was changed and changed back was not changed. The last state is
//   always seen.
// - compare_set. c10d returns the value in the end, which does not say who stored it. So the bridge first stores an
//   envelope (a mark, a random token, the value), sees by the token whether it won, and then replaces the envelope by
//   the plain value. Bridges read through an envelope; others may see one for a moment, or for good if the process dies
//   in that moment. "Is absent" and "holds the empty string" are the same to c10d; the bridge looks first, so only
//   another's change between the look and the exchange can be mistaken.
// - add and erase. c10d's stores do what they like with a value that is no number and with a key that is not there, so
//   the bridge looks first here too: of two that erase a key at once, both may be told that they did. A key that is
//   used with add() should not be used with compare_set().
//
// - Deadlines. c10d's calls have none. When a rank leaves a note in the store as it ends or fails, Muster makes the
//   call in a thread of its own and waits for it for a limited time.
//
// to_c10d() makes a c10d::Store of a Muster store, for ProcessGroupGloo, NCCL and Python. It has c10d's semantics: an
// empty expected value means "absent", get() waits for the store's own timeout, zero is no timeout. It has the extended
// API (append, multiGet, multiSet), not the queues.
//
// Errors: from_c10d: c10::DistStoreError becomes Timeout, everything else that c10d throws Unavailable. to_c10d:
// Timeout becomes c10::DistStoreError, Unavailable c10::DistNetworkError, InvalidArgument c10::ValueError, the rest
// c10::DistError.
// Thread-safety: as Store; a thread that waits blocks no other. to_c10d()'s setTimeout() is as unsafe as c10d's own.
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
