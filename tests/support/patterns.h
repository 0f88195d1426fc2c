// What tensors hold in tests, and what collectives must make of it.
//
// Contents repeat with a prime period, so a result of any length is compared with one short table, and a byte that
// lands at a wrong place is found. The reference reduces in 64-bit floats, in rank order, and rounds after each step to
// what the documentation of muster/comm/collectives.h says the accumulator is: results must be equal to the bit.
//
// Thread-safety: all functions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "muster/comm/group.h"

namespace muster::test {

inline constexpr int64_t kPeriod = 4099;

// Under the sanitizers, which look at memory and threads and not at arithmetic, one of each width and kind.
const std::vector<at::ScalarType>& reducible_types();
const std::vector<at::ScalarType>& movable_types();  // these and 8-bit floats
// What a dtype can be reduced with (PREMUL_SUM has tests of its own).
const std::vector<ReduceOp>& ops_of(at::ScalarType dtype);
inline constexpr ReduceOp kAllOps[] = {ReduceOp::SUM, ReduceOp::AVG,  ReduceOp::PRODUCT,
                                       ReduceOp::MIN, ReduceOp::MAX,  ReduceOp::BAND,
                                       ReduceOp::BOR, ReduceOp::BXOR, ReduceOp::PREMUL_SUM};

// What rank r contributes: kPeriod elements. Floats between -2 and 2; integers of any bits, so that sums and products
// wrap.
const at::Tensor& table_of(at::ScalarType dtype, int rank);
// The reduction of the tables of ranks 0 … n-1.
const at::Tensor& reduced_table(at::ScalarType dtype, ReduceOp op, int n);

// Element by element over flat tensors of one size and dtype.
at::Tensor reference(ReduceOp op, const std::vector<at::Tensor>& by_rank);

// A flat tensor with element i = table[(i + shift) % kPeriod].
at::Tensor tile(const at::Tensor& table, int64_t shift, int64_t count);

// "" where `actual`, read in row-major order, equals tile(table, shift, actual.numel()) to the bit; else the first
// difference.
std::string difference(const at::Tensor& actual, const at::Tensor& table, int64_t shift);
// The same between two tensors of equal size.
std::string difference(const at::Tensor& actual, const at::Tensor& expected);

}  // namespace muster::test
