// Tensors of every kind that a collective must take: ordinary, on the heap, non-contiguous, views.
//
// Thread-safety: a TestTensor belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "muster/comm/world.h"

namespace muster::test {

enum class Kind {
  kOrdinary,
  kHeap,
  kMixed,         // on the heap on even ranks, ordinary on odd ones
  kView,          // contiguous, but in the middle of a larger tensor and not aligned to more than an element
  kHeapView,      // the same, on the heap
  kStrided,       // every second element
  kTransposed,    // a matrix, by columns
  kChannelsLast,  // four dimensions
  kScalar,        // no dimension, where there is one element
};
inline constexpr Kind kKinds[] = {Kind::kOrdinary,   Kind::kHeap,         Kind::kMixed,
                                  Kind::kView,       Kind::kHeapView,     Kind::kStrided,
                                  Kind::kTransposed, Kind::kChannelsLast, Kind::kScalar};
std::string_view to_string(Kind kind);

// A tensor with the elements of `flat` (in row-major order), and the memory around it.
class TestTensor {
 public:
  TestTensor(const World& world, int rank, Kind kind, const at::Tensor& flat);

  const at::Tensor& operator*() const { return tensor_; }
  const at::Tensor* operator->() const { return &tensor_; }
  operator const at::Tensor&() const { return tensor_; }

  // Whether the memory around the tensor holds what it held at first.
  bool surroundings_intact() const;

 private:
  at::Tensor base_, before_, tensor_;
};

}  // namespace muster::test
