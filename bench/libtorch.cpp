// A program that has nothing of Muster: libtorch is loaded, and one tensor is made.
#include <ATen/ops/ones.h>

#include "event.h"

int main() {
  const at::Tensor t = at::ones({16});
  tell("first");
}
