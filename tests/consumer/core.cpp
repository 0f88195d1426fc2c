// Links Muster::core: the store, without libtorch.
#include <muster/base/error.h>
#include <muster/store/store.h>

#include <chrono>
#include <iostream>

int main() {
  const auto store = muster::make_memory_store();
  store->add("visitors", 2);
  store->add("visitors", 3);
  try {
    store->get("nobody", muster::Deadline::after(std::chrono::milliseconds(10)));
  } catch (const muster::TimeoutError&) {
    std::cout << "visitors: " << store->get("visitors", muster::Deadline::never()) << std::endl;
    return 0;
  }
  return 1;
}
