// The first barrier of a job without libtorch: all ranks meet in the job's store.
#include <chrono>
#include <cstdlib>

#include "event.h"
#include "muster/store/store.h"

int main() {
  const auto deadline = muster::Deadline::after(std::chrono::minutes(5));
  const auto store = muster::connect_job_store(deadline);
  if (store->add("here", 1) == std::atoi(std::getenv("WORLD_SIZE"))) store->set("all here", "");
  store->wait({"all here"}, deadline);
  if (std::atoi(std::getenv("RANK")) == 0) tell("first");
}
