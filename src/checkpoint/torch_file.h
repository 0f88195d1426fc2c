// Files of Python's torch.save() that hold tensors: a dictionary of them, or dictionaries within each other, such as
// module.state_dict() and a checkpoint's {"model": …, "optimizer": …} made of tensors only.
//
// Such a file is a zip archive of a pickle and the bytes of each storage. A pickle is a program. This reader knows the
// instructions that make data, and of the functions that a pickle may call only those which rebuild tensors, parameters and
// ordered dictionaries; it refuses all others by name. (torch::pickle_load() cannot read what state_dict() returns, because that
// has attributes.)
//
// Errors: CorruptError, which names the file and the byte of the pickle; InvalidArgument if it holds something else than tensors;
// Unavailable. Thread-safety: functions of their arguments. Source: torch.serialization; PEP 3154; pickletools.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>

namespace muster::checkpoint {

// By name: "layers.0.weight"; those of dictionaries within others as "model.layers.0.weight"; a tensor alone is "tensor". Tensors that
// share a storage in the file do so here.
std::map<std::string, at::Tensor> tensors_of_torch_file(const std::string& path);
// The same from a pickle. `storage`: the bytes of a storage, by its key in the file; none if there is no such.
std::map<std::string, at::Tensor> tensors_in_pickle(
    std::string_view pickle, const std::string& name,
    const std::function<std::optional<at::Tensor>(const std::string& key)>& storage);

// A file with a dictionary of tensors, which torch.load(…, weights_only=True) reads.
std::string torch_file_of(const std::map<std::string, at::Tensor>& tensors);

}  // namespace muster::checkpoint
