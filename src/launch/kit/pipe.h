// Close-on-exec descriptors that are never 0, 1 or 2, so that a rank can put its own there in any order.
// This also holds if this process was started with some of them closed.
//
// Thread-safety: all of it.
#pragma once

#include "base/fd.h"

namespace muster::launch {

struct Pipe {
  UniqueFd read, write;
};

struct SocketPair {
  UniqueFd one, other;  // of messages, in both directions
};

Pipe make_pipe();                      // Unavailable if there are too few descriptors
SocketPair make_socket_pair();         // as above
UniqueFd open_null(int flags);         // /dev/null
UniqueFd above_standard(UniqueFd fd);  // itself, or a copy with a higher number
void set_nonblocking(const UniqueFd& fd);

}  // namespace muster::launch
