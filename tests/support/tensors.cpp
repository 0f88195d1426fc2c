#include "support/tensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

namespace muster::test {

std::string_view to_string(Kind kind) {
  static constexpr std::string_view kNames[] = {"ordinary",   "on the heap",   "on the heap on even ranks",
                                                "view",       "heap view",     "strided",
                                                "transposed", "channels last", "scalar"};
  return kNames[static_cast<size_t>(kind)];
}

TestTensor::TestTensor(const World& world, int rank, Kind kind, const at::Tensor& flat) {
  const int64_t count = flat.numel();
  const bool heap = kind == Kind::kHeap || kind == Kind::kHeapView || (kind == Kind::kMixed && rank % 2 == 0);
  const bool view = kind == Kind::kView || kind == Kind::kHeapView;
  const int64_t room = view ? count + 2 : kind == Kind::kStrided ? 2 * count + 1 : count;
  base_ = heap ? world.heap().empty({room}, flat.scalar_type()) : at::empty({room}, flat.scalar_type());
  base_.fill_(1);
  switch (kind) {
    case Kind::kView:
    case Kind::kHeapView:
      tensor_ = base_.narrow(0, 1, count);
      break;
    case Kind::kStrided:
      tensor_ = base_.as_strided({count}, {2}, 1);
      break;
    case Kind::kTransposed: {
      const int64_t rows = count % 3 == 0 ? 3 : count % 2 == 0 ? 2 : 1;
      tensor_ = base_.view({count / rows, rows}).t();
      break;
    }
    case Kind::kChannelsLast: {
      const int64_t channels = count % 3 == 0 ? 3 : 1, height = count % 2 == 0 ? 2 : 1;
      tensor_ = base_.view({1, height, count / channels / height, channels}).permute({0, 3, 1, 2});
      break;
    }
    case Kind::kScalar:
      tensor_ = count == 1 ? base_.view(at::IntArrayRef()) : base_;
      break;
    default:
      tensor_ = base_;
  }
  if (room > count) before_ = base_.clone();
  tensor_.copy_(flat.view(tensor_.sizes()));
}

bool TestTensor::surroundings_intact() const {
  if (!before_.defined()) return true;
  at::Tensor now = base_.clone();
  now.as_strided(tensor_.sizes(), tensor_.strides(), tensor_.storage_offset()).fill_(1);
  return at::equal(now, before_);
}

}  // namespace muster::test
