// The content of a call or an answer: msgpack bytes, and beside them the tensors that packing found in the values. In
// the bytes, a tensor's index in that list stands for it, so that a transport can move tensors without a copy.
//
// Thread-safety: values; not shared. Errors: none here; see serialize.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace muster::rpc {

struct Payload {
  std::string body;
  std::vector<at::Tensor> tensors;
  std::vector<std::shared_ptr<void>> refs;  // references to remote objects (rref.h), by place
  std::string note;                         // from the layer above rpc to its peer
};

// A payload that arrived. Reading it takes the tensors out: afterwards `tensors` is empty.
struct PayloadReader {
  std::string_view body;
  std::vector<at::Tensor>& tensors;
  std::vector<std::shared_ptr<void>>* refs = nullptr;
};

}  // namespace muster::rpc
