// Files of Python's torch.save() that hold tensors: a dictionary of them, or dictionaries within each other, such as
// module.state_dict() and a checkpoint's {"model": …, "optimizer": …} made of tensors only.
//
// Such a file is a zip archive of a pickle (torch_pickle.h), the bytes of each storage, and the byte order. A reader
// takes no more bytes from it than the file has: a compressed record, or one that lies within another, is refused.
//
// Errors: CorruptError, which names the file; those of torch_pickle.h; Unavailable. Thread-safety: functions of their
// arguments. Source: torch.serialization.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <string>

namespace muster::checkpoint {

// Whether it begins as such a file does. Unavailable if it cannot be read.
bool is_torch_file(const std::string& path);

// As tensors_in_pickle().
std::map<std::string, at::Tensor> tensors_of_torch_file(const std::string& path);

// A file with a dictionary of tensors, which torch.load(…, weights_only=True) reads. It is complete or absent.
// InvalidArgument if Python lacks a dtype, or a tensor is not dense.
void write_torch_file(const std::string& path, const std::map<std::string, at::Tensor>& tensors);

}  // namespace muster::checkpoint
