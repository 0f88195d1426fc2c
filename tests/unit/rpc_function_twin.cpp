// A second file with a static function that has the same name as one in rpc_function_test.cpp.
#include "muster/rpc/function.h"

namespace muster::rpc {
static int twin(int x) { return x + 2; }
const Function& twin_in_another_file();
const Function& twin_in_another_file() { return function_of<&twin>(); }
}  // namespace muster::rpc
