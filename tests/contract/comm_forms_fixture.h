// What the tests of forms of operations have in common.
#pragma once

#include "support/ranks.h"

namespace muster::test::operation_forms {

using std::chrono::milliseconds;

class Forms : public CommContract {};

}  // namespace muster::test::operation_forms
