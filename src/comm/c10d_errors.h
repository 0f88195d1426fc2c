// Muster's errors as PyTorch's users and tools know them: InvalidArgument becomes c10::ValueError (ValueError in
// Python), everything else c10::DistBackendError (torch.distributed.DistBackendError, a RuntimeError). Thrown as c10's
// own types rather than translated in the Python module, so they also pass through PyTorch's C++ (the autograd engine,
// futures).
//
// Texts have the words by which tools recognise gloo's: "Timed out waiting 1000ms" for Timeout, "Connection closed by
// peer" for PeerLost.
//
// Thread-safety: all functions.
#pragma once

#include <chrono>
#include <exception>

namespace muster::comm {

// `limit`: the timeout that held. Whatever is no muster::Error stays as it is.
std::exception_ptr as_c10d_error(const std::exception_ptr& error, std::chrono::milliseconds limit);

}  // namespace muster::comm
