// `muster run -v` asks the ranks too to say what they have chosen: this variable is then set in their environment.
#pragma once

namespace muster {

inline constexpr const char* kVerboseVariable = "MUSTER_VERBOSE";

}  // namespace muster
