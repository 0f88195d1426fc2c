// muster-checkpoint: the part of `muster checkpoint` that needs libtorch. The muster command checks the arguments, and
// passes them on (checkpoint::answer()).
#include <iostream>

#include "checkpoint/inspect.h"

int main(int argc, char** argv) {
  const auto [status, out, err] = muster::checkpoint::answer({argv + 1, argv + argc});
  std::cout << out << std::flush;
  std::cerr << err << std::flush;
  if (!std::cout) {
    std::cerr << "muster: the standard output cannot be written" << std::endl;
    return 1;
  }
  return status;
}
