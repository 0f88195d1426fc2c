// Translates Muster's errors to those that PyTorch's users and tools know: InvalidArgument becomes c10::ValueError
// (ValueError in Python), every other error c10::DistBackendError (torch.distributed.DistBackendError, a RuntimeError).
// They are thrown as c10's types, not translated in the Python module, so they also pass through PyTorch's C++ (the
// autograd engine, futures).
//
// The texts contain the words by which tools recognise gloo's errors: "Timed out waiting 1000ms" for TimeoutError,
// "Connection closed by peer" for PeerLost.
//
// Thread-safety: all functions.
#pragma once

#include <chrono>
#include <exception>

namespace muster::comm {

// `limit`: the timeout that applied. An exception that is not a muster::Error is returned unchanged.
std::exception_ptr as_c10d_error(const std::exception_ptr& error, std::chrono::milliseconds limit);

}  // namespace muster::comm
