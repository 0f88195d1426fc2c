// What each of a rank's shards finds: the module's buffers as they were before the step; and, when its turn comes
// (shard_turns.h), as it has left them, with libtorch's default CPU generator, and whether operators read copies of the
// parameters.
//
// Buffers are compared by nothing: all are put away and brought back, because libtorch's batch norm and others write
// them without a new version. Each shard has version counters of its own, so that a graph that has kept a buffer does
// not mind what is written into it between its shard's turns. Buffers in one storage have one counter.
//
// Thread-safety: none. Afterwards buffers are as the last turn has left them, with versions that no shard has seen.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "parallel/kit/random_numbers.h"
#include "parallel/modules/compute_copy.h"
#include "parallel/modules/same_module.h"

namespace muster::ddp {

class BuffersBefore {
 public:
  explicit BuffersBefore(const std::vector<parallel::NamedTensor>& buffers);

  // InvalidArgument, which names the buffer, if one has other memory, another shape or another dtype than before.
  void require_same_memory() const;
  void restore_memory() const;
  void restore() const;  // memory and values

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor, as_before, values;  // `as_before` shares the memory
  };
  std::vector<Buffer> buffers_;
};

class ShardStates {
 public:
  // `before` is used until the end. `copies`: null without mixed precision.
  ShardStates(const std::vector<parallel::NamedTensor>& buffers, const BuffersBefore& before,
              std::shared_ptr<parallel::CopyPhase> copies, size_t shards);
  ShardStates(const ShardStates&) = delete;
  ShardStates& operator=(const ShardStates&) = delete;
  ~ShardStates();

  void begin_turn(size_t shard);
  void end_turn(size_t shard);  // throws what require_same_memory() throws

 private:
  struct Buffer {
    at::Tensor tensor;
    c10::VariableVersion version;
    size_t counter;  // of each shard
  };
  struct State {
    std::vector<at::Tensor> values;  // empty before the first turn
    std::vector<c10::VariableVersion> counters;
    std::optional<parallel::RandomState> random;
    int forwards = 0;  // of CopyPhase
  };

  const BuffersBefore& before_;
  std::vector<Buffer> buffers_;
  const std::shared_ptr<parallel::CopyPhase> copies_;
  std::vector<State> states_;
};

}  // namespace muster::ddp
