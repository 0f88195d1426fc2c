#include "comm/kit/tensor_bytes.h"

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
      break;
    case OpKind::kReduceScatter:
    case OpKind::kScatter:
      tensor = flat.output(operation.tensor);
      flat_inputs = flat.inputs(operation.inputs);
      inputs = parts_of<ConstBytes>(flat_inputs, n, tensor.nbytes());
      break;
    case OpKind::kAllToAll:
      flat_inputs = flat.inputs(operation.inputs);
      flat_outputs = flat.outputs(operation.outputs);
      split_parts(flat_inputs, operation.input_splits, n, inputs, send);
      split_parts(flat_outputs, operation.output_splits, n, outputs, receive);
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
  call.one_piece =
      flat_inputs.size() == 1 &&
      (call.kind != OpKind::kAllToAll || (flat_outputs.size() == 1 && !flat_outputs[0].is_alias_of(flat_inputs[0])));
  run(call);
  flat.copy_back();
}

}  // namespace muster::comm
