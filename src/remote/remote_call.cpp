#include "muster/remote/remote_call.h"

#include <typeinfo>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::detail {
namespace {

template <typename E>
std::exception_ptr with_note(const E& error, const std::string& note) {
  return std::make_exception_ptr(E(error.message() + note, error.advice()));
}

}  // namespace

std::exception_ptr error_of_part(const std::exception_ptr& error, size_t part, size_t parts) {
  if (parts < 2) return error;
  const std::string note = text(" [part ", part, " of ", parts, ']');
  try {
    std::rethrow_exception(error);
  } catch (const Error& caught) {
    // Adds the note to these types, because a copy of them loses nothing. An error of a derived type stays as it is.
    const std::type_info& type = typeid(caught);
    if (type == typeid(RemoteError)) {
      const auto& remote = static_cast<const RemoteError&>(caught);
      return std::make_exception_ptr(RemoteError(remote.worker(), remote.function(), remote.type(),
                                                 remote.remote_message() + note, remote.advice()));
    }
    if (type == typeid(PeerLost)) {
      const auto& lost = static_cast<const PeerLost&>(caught);
      return std::make_exception_ptr(PeerLost(lost.rank(), lost.pid(), lost.message() + note, lost.advice()));
    }
    if (type == typeid(TimeoutError)) {
      const auto& late = static_cast<const TimeoutError&>(caught);
      return std::make_exception_ptr(TimeoutError(late.message() + note, late.missing(), late.advice()));
    }
    if (type == typeid(Aborted)) return with_note(static_cast<const Aborted&>(caught), note);
    if (type == typeid(InvalidArgument)) return with_note(static_cast<const InvalidArgument&>(caught), note);
    if (type == typeid(CorruptError)) return with_note(static_cast<const CorruptError&>(caught), note);
    if (type == typeid(Unavailable)) return with_note(static_cast<const Unavailable&>(caught), note);
  } catch (...) {
    // An exception that is not Muster's stays as it is.
  }
  return error;
}

}  // namespace muster::detail
