#include "muster/remote/partitioner.h"

#include <ATen/ops/narrow.h>
#include <ATen/ops/select.h>

#include <algorithm>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster {

DimPartitioner::DimPartitioner(int64_t dim, DimOptions options) : dim_(dim), options_(std::move(options)) {
  if (!options_.keepdim && !options_.exclusive)
    throw InvalidArgument("dim_partitioner: .keepdim = false removes the dimension that parts of several rows need",
                          "Set .exclusive = true with it");
  if (options_.balanced && !options_.exclusive)
    throw InvalidArgument("dim_partitioner: .balanced = true needs more parts than workers",
                          "Set .exclusive = true with it");
}

namespace detail {

void DimSplit::add(const at::Tensor& tensor, size_t argument) {
  const int64_t dim = how_.dim(), dims = tensor.dim();
  if (dim >= dims || dim < -dims)
    throw InvalidArgument(
        text("dim_partitioner: argument ", argument, " has a tensor of ", dims,
             dims == 1 ? " dimension" : " dimensions", ", which cannot be split along dimension ", dim),
        "Let the function take a number, or a muster::Whole of the tensor");
  const int64_t rows = tensor.size(dim);
  if (rows_ && *rows_ != rows)
    throw InvalidArgument(text("dim_partitioner: a tensor of argument ", argument, ": expected ", *rows_,
                               " rows in dimension ", dim, ", as one of argument ", argument_, " has, got ", rows),
                          "All tensors of the arguments are split; let the function take muster::Whole<…> of what "
                          "each part needs undivided");
  if (!rows_) argument_ = argument;
  rows_ = rows;
}

void DimSplit::plan() {
  const auto& given = how_.options().workers;
  workers_ = given.empty() ? rpc::all_workers().size() : given.size();
  const auto rows = static_cast<size_t>(rows_.value_or(1));
  parts_ = how_.options().exclusive ? rows : std::min(rows, workers_);
}

WorkerId DimSplit::worker(size_t part) const {
  if (whole()) return get_worker_id();
  const auto& given = how_.options().workers;
  if (how_.options().balanced) return any_worker(given);
  return given.empty() ? WorkerId(static_cast<int>(part % workers_)) : given[part % workers_];
}

at::Tensor DimSplit::cut(const at::Tensor& tensor, size_t part) const {
  const auto i = static_cast<int64_t>(part), parts = static_cast<int64_t>(parts_);
  if (!how_.options().keepdim) return at::select(tensor, how_.dim(), i);
  const int64_t each = *rows_ / parts;
  return at::narrow(tensor, how_.dim(), i * each, i + 1 < parts ? each : *rows_ - i * each);
}

}  // namespace detail
}  // namespace muster
