// Which processor this is, where code has been measured to depend on it.
//
// Thread-safety: all functions.
#pragma once

namespace muster {

// AMD's Zen 5 or a later one, with fast short "rep movsb" (FSRM).
bool is_zen_5_or_later();

}  // namespace muster
