// The pickle in a file of torch.save(): which tensors there are, and where in which storage.
//
// Of the functions that a pickle may call, only those are known which rebuild tensors, parameters and ordered
// dictionaries; all others are refused by name. (torch::pickle_load() cannot read what state_dict() returns, because
// that has attributes.)
//
// Errors: CorruptError, which names the file and the byte of the pickle; InvalidArgument if it holds something else
// than tensors, or two of one name. Thread-safety: functions of their arguments. Source: torch._utils, torch._tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace muster::checkpoint {

// By name: "layers.0.weight"; those of dictionaries within others as "model.layers.0.weight"; a tensor alone is
// "tensor". Tensors that share a storage in the file do so here. They may be views that repeat elements, and be
// conjugated or negated lazily. `name`: of the file. `storage`: the bytes of a storage, by its key in the file; none if
// there is no such.
std::map<std::string, at::Tensor> tensors_in_pickle(
    std::string_view pickle, const std::string& name,
    const std::function<std::optional<at::Tensor>(const std::string& key)>& storage);

// A dictionary of the tensors, which torch.load(…, weights_only=True) reads. The bytes of the first tensor are storage
// 0, those of the second 1, and so on. InvalidArgument if Python lacks a dtype.
std::string pickle_of(const std::map<std::string, at::Tensor>& tensors);

}  // namespace muster::checkpoint
