// `muster run -v` sets this variable in the ranks' environment. It makes the ranks, too, report what they have chosen.
#pragma once

namespace muster {

inline constexpr const char* kVerboseVariable = "MUSTER_VERBOSE";

}  // namespace muster
