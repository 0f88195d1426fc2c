// Must not compile with -Werror=unused-result: the World is gone at the semicolon. comm_world_discarded.cmake has the
// text.
#include "muster/comm/world.h"

void leaves_the_job() { muster::init(); }
void stays() { const auto world = muster::init(); }
