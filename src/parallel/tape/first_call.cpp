#include "parallel/tape/first_call.h"

#include <ATen/autocast_mode.h>

#include <utility>

#include "muster/base/error.h"

namespace muster::parallel {
namespace {

int autocast_nesting() {
  at::autocast::increment_nesting();
  return at::autocast::decrement_nesting();
}

std::unique_ptr<RandomNumbersGuard> with_random_numbers(const std::optional<RandomState>& of) {
  if (!of) return nullptr;
  auto guard = std::make_unique<RandomNumbersGuard>(of->now());
  of->set();
  return guard;
}

}  // namespace

FirstCall::FirstCall(bool preserve_rng_state, const std::vector<at::Tensor>& arguments) {
  if (preserve_rng_state) random_ = RandomState::with_devices_of(arguments);
  for (const at::Tensor& tensor : arguments) arguments_.push_back({tensor, version_of(tensor)});
}

void FirstCall::end() {
  for (const Argument& argument : std::exchange(arguments_, {}))
    if (version_of(argument.tensor) != argument.version)
      throw InvalidArgument("the function of activation_checkpoint() has changed an argument in place",
                            "Use an operator that returns a new tensor");
  if (random_ && random_->now() == *random_) random_.reset();  // it has drawn none
}

FirstCall::Again::Again(const FirstCall& of) : random_(with_random_numbers(of.random_)), state_(of.state_) {}

FirstCall::WithoutAutocastCache::WithoutAutocastCache()
    : nesting_(autocast_nesting()), before_(at::autocast::is_autocast_cache_enabled()) {
  at::autocast::set_autocast_cache_enabled(false);
}
FirstCall::WithoutAutocastCache::~WithoutAutocastCache() {
  while (autocast_nesting() > nesting_) at::autocast::decrement_nesting();
  at::autocast::set_autocast_cache_enabled(before_);
}

}  // namespace muster::parallel
