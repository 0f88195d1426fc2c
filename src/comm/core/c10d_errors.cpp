#include "comm/core/c10d_errors.h"

#include <c10/util/Exception.h>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::comm {
namespace {

template <typename C10Error>
std::exception_ptr make(const std::string& message) {
  return std::make_exception_ptr(C10Error({"", "", 0}, message));
}

}  // namespace

std::exception_ptr as_c10d_error(const std::exception_ptr& error, std::chrono::milliseconds limit) {
  try {
    std::rethrow_exception(error);
  } catch (const InvalidArgument& e) {
    return make<c10::ValueError>(e.what());
  } catch (const TimeoutError& e) {
    return make<c10::DistBackendError>(text("Muster: Timed out waiting ", limit.count(), "ms: ", e.what()));
  } catch (const PeerLost& e) {
    return make<c10::DistBackendError>(text("Muster: Connection closed by peer: ", e.what()));
  } catch (const Error& e) {
    return make<c10::DistBackendError>(text("Muster: ", e.what()));
  } catch (...) {
    return error;
  }
}

}  // namespace muster::comm
