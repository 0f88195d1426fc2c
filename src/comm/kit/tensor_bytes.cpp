#include "comm/kit/tensor_bytes.h"

#include <algorithm>
#include <utility>

namespace muster::comm {
namespace {

// One side of an all_to_all: where each rank's part begins and how long it is.
template <typename Pointer>
void split_parts(const std::vector<at::Tensor>& tensors, const std::vector<int64_t>& splits, size_t ranks,
                 std::vector<Pointer>& pointers, std::vector<uint64_t>& sizes) {
  if (tensors.size() == ranks && ranks > 1) {
    for (const auto& tensor : tensors) {
      pointers.push_back(data_of(tensor));
      sizes.push_back(tensor.nbytes());
    }
    return;
  }
  const at::Tensor& tensor = tensors[0];
  const auto total = static_cast<uint64_t>(tensor.nbytes());
  const uint64_t row = splits.empty() || tensor.size(0) == 0 ? 0 : total / static_cast<uint64_t>(tensor.size(0));
  Bytes at = data_of(tensor);
  for (size_t r = 0; r < ranks; ++r) {
    pointers.push_back(at);
    sizes.push_back(splits.empty() ? total / ranks : static_cast<uint64_t>(splits[r]) * row);
    at += sizes.back();
  }
}

bool overlap(ConstBytes a, size_t a_bytes, ConstBytes b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

// Whether `bytes` at `data` overlap one of `parts`, which have as many each. A rank's own part may be the same memory:
// no other rank's data come there, nor does another rank read it.
template <typename Pointer>
bool overlap_any(ConstBytes data, const std::vector<Pointer>& parts, size_t bytes, int rank) {
  for (size_t r = 0; r < parts.size(); ++r)
    if (overlap(data, bytes, parts[r], bytes) && !(r == static_cast<size_t>(rank) && parts[r] == data)) return true;
  return false;
}

// The same for the parts of an all_to_all.
bool overlap_any(const std::vector<ConstBytes>& inputs, const std::vector<uint64_t>& send,
                 const std::vector<Bytes>& outputs, const std::vector<uint64_t>& receive, int rank) {
  const auto own = static_cast<size_t>(rank);
  const auto ends = [](const auto& parts, const std::vector<uint64_t>& sizes) {
    std::pair<ConstBytes, ConstBytes> ends{parts[0], parts[0] + sizes[0]};
    for (size_t r = 1; r < parts.size(); ++r)
      ends = {std::min<ConstBytes>(ends.first, parts[r]), std::max<ConstBytes>(ends.second, parts[r] + sizes[r])};
    return ends;
  };
  const auto from = ends(inputs, send), to = ends(outputs, receive);
  if (from.second <= to.first || to.second <= from.first) return false;
  for (size_t i = 0; i < inputs.size(); ++i)
    for (size_t o = 0; o < outputs.size(); ++o) {
      const bool is_own_part = i == own && o == own && inputs[i] == outputs[o];
      if (!is_own_part && overlap(inputs[i], send[i], outputs[o], receive[o])) return true;
    }
  return false;
}

std::vector<at::Tensor> clones_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> clones;
  clones.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) clones.push_back(tensor.clone());
  return clones;
}

}  // namespace

void run_on_bytes(const Operation& operation, int rank, int ranks, Deadline deadline,
                  const std::function<void(ByteCall&)>& run) {
  const auto n = static_cast<size_t>(ranks);
  ByteCall call{.kind = operation.kind,
                .part_of = operation.part_of,
                .op = operation.op,
                .root = operation.peer,
                .deadline = deadline,
                .announced = operation.announced ? &*operation.announced : nullptr,
                .blocks = operation.blocks,
                .site = operation.site};
  Flatten flat;
  std::vector<ConstBytes> inputs;
  std::vector<Bytes> outputs;
  std::vector<uint64_t> send, receive;
  at::Tensor tensor;  // these keep contiguous copies until the call is over
  std::vector<at::Tensor> flat_inputs, flat_outputs;

  switch (operation.kind) {
    case OpKind::kAllReduce:
    case OpKind::kScan:
      tensor = flat.in_place(operation.tensor);
      break;
    case OpKind::kReduce:
      tensor = rank == operation.peer ? flat.in_place(operation.tensor) : flat.input(operation.tensor);
      break;
    case OpKind::kBroadcast:
      tensor = rank == operation.peer ? flat.input(operation.tensor) : flat.output(operation.tensor);
      break;
    case OpKind::kAllGather:
    case OpKind::kGather:
      tensor = flat.input(operation.tensor);
      flat_outputs = flat.outputs(operation.outputs);
      outputs = parts_of<Bytes>(flat_outputs, n, tensor.nbytes());
      // Others read the input while their data come into the outputs.
      if (overlap_any(data_of(tensor), outputs, tensor.nbytes(), rank)) tensor = tensor.clone();
      break;
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      tensor = flat.output(operation.tensor);
      flat_inputs = flat.inputs(operation.inputs);
      inputs = parts_of<ConstBytes>(flat_inputs, n, tensor.nbytes());
      if (overlap_any(data_of(tensor), inputs, tensor.nbytes(), rank)) {
        flat_inputs = clones_of(flat_inputs);
        inputs = parts_of<ConstBytes>(flat_inputs, n, tensor.nbytes());
      }
      break;
    case OpKind::kAllToAll:
      flat_inputs = flat.inputs(operation.inputs);
      flat_outputs = flat.outputs(operation.outputs);
      split_parts(flat_inputs, operation.input_splits, n, inputs, send);
      split_parts(flat_outputs, operation.output_splits, n, outputs, receive);
      if (overlap_any(inputs, send, outputs, receive, rank)) {
        flat_inputs = clones_of(flat_inputs);
        inputs.clear();
        send.clear();
        split_parts(flat_inputs, operation.input_splits, n, inputs, send);
      }
      call.item = flat_inputs[0].element_size();
      call.dtype = static_cast<uint8_t>(flat_inputs[0].scalar_type());
      break;
    case OpKind::kBarrier:
      break;
    case OpKind::kNothing:
    case OpKind::kSend:
    case OpKind::kRecv:
    case OpKind::kAllReduceSparse:
      return;  // do not come here
  }
  if (tensor.defined()) {
    call.count = static_cast<size_t>(tensor.numel());
    call.item = tensor.element_size();
    call.dtype = static_cast<uint8_t>(tensor.scalar_type());
    call.data = data_of(tensor);
  }
  if (reduces(call.kind)) call.kernel = reduce_kernel(tensor.scalar_type(), call.op);
  call.inputs = inputs;
  call.outputs = outputs;
  call.send = send;
  call.receive = receive;
  call.one_piece = flat_inputs.size() == 1 && (call.kind != OpKind::kAllToAll || flat_outputs.size() == 1);
  run(call);
  flat.copy_back();
}

}  // namespace muster::comm
