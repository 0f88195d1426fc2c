// Does not compile: each line's error says what to write instead. remote_misuse.cmake has the texts.
#include "muster/remote/parallelize.h"

using at::Tensor;
using namespace muster;

Tensor loss(Tensor batch, double factor);
std::string label(Tensor batch);
std::pair<int, int> counts(Tensor batch);
void owns(std::unique_ptr<int> one, Tensor batch);
struct Model {
  Tensor forward(Tensor batch);
};

void fewer(Tensor x) { parallelize<&loss>()(x); }
void more(Tensor x) { remote_sync_call<&loss>(x, 2, 3); }
void other_type(Tensor x) { remote_sync_call<&loss>(x, std::string("2")); }
void no_partitioner(Tensor x) {
  remote_sync_call<&loss>(x, 2, {.partitioner = [](const Tensor& batch) { return batch; }});
}
void other_result(Tensor x) {
  remote_sync_call<&loss>(x, 2, {.reducer = [](std::vector<Tensor> all) { return std::string("x"); }});
}
void no_mean(Tensor x) { remote_sync_call<&label>(x, {.reducer = mean_reducer}); }
void mean_of_integers(Tensor x) { parallelize<&counts>()(x); }
void moves(Tensor x) { remote_async_call<&owns>(std::make_unique<int>(1), x); }
void of_an_object(Tensor x) { remote_sync_call<&Model::forward>(x); }
