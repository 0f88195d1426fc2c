#include "parallel/tape/saved_tensors.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>
#include <utility>

#include "muster/base/error.h"

namespace muster::parallel {
namespace {

namespace engine = torch::autograd;

thread_local Keeper* current = nullptr;
thread_local bool second_call = false;

class KeepingEngine final : public engine::Engine {
 public:
  // libtorch starts the threads of one engine per process, on first use. The base engine's must come first: see
  // Engine::initialize_device_threads_pool().
  KeepingEngine() {
    engine::Engine::get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }
  std::unique_ptr<engine::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current ? current->hooks() : nullptr;
  }
};

engine::Engine& keeping_engine() {
  // Leaked on purpose, as libtorch's own: its threads may outlive all else.
  static KeepingEngine& ours = *std::make_unique<KeepingEngine>().release();
  return ours;
}

}  // namespace

Keeper* current_keeper() { return current; }
Keeper* exchange_keeper(Keeper* keeper) { return std::exchange(current, keeper); }

Keeping::Keeping(Keeper* keeper) : set_(current, keeper) {}
InSecondCall::InSecondCall() : set_(second_call, true) {}
bool in_second_call() { return second_call; }

void require_keepers() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (&engine::Engine::get_default_engine() != &engine::Engine::get_base_engine()) return;
    keeping_engine();
    engine::set_default_engine_stub(&keeping_engine);
  });
  if (dynamic_cast<KeepingEngine*>(&engine::Engine::get_default_engine()) == nullptr)
    throw Unavailable("another autograd engine runs in this process, such as Python's",
                      "Use PyTorch's functions in Python");
}

}  // namespace muster::parallel
