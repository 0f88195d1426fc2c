// How ranks of launch_program fail.
#pragma once

#include <map>
#include <string>

#include "multiprocess/launch_programs/rank.h"

namespace launch_program {

// By the name that is the program's first argument. All ranks meet first; then one of them fails, or brings a failure
// about.
const std::map<std::string, Behaviour>& failures();

}  // namespace launch_program
