// Safetensors files: tensors by name, as Python's safetensors and Hugging Face's models have them.
//
//   muster::SafetensorsFile file("model.safetensors");
//   at::Tensor weight = file.tensor("layers.0.weight");
//   file.load_into(*net);                                  // every parameter and buffer, by name
//   muster::save_safetensors("model.safetensors", *net);
//
// A file is mapped, not read: pages come from the disk when they are used, and a tensor that is only looked at costs no
// memory of its own. Tensors keep the mapping alive. What a program writes to one stays in this process. Do not change
// the file meanwhile; replace it by another of its name, as save_safetensors() does.
//
// A model that no process could hold is filled by each rank with what it owns (on_meta.h, fsdp.h):
//
//   const auto file = std::make_shared<muster::SafetensorsFile>("model.safetensors");
//   auto model = muster::fully_shard(muster::on_meta([] { return std::make_shared<Net>(); }),
//       {.init = [file](const std::string& name, at::Tensor values, at::Generator) {
//         values.copy_(file->tensor(name));
//       }});
//
// Snapshots (snapshot.h) are safetensors files as well: .prefix = "model/" loads the item "model" of one, on any rank,
// without the training, if it is one file and "model" was not added with .per_rank. Checksums are not verified then.
//
// Thread-safety: const functions may run concurrently. Source: the safetensors library.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace muster {

struct SafetensorsLoadOptions {
  std::string prefix;  // of names in the file
  bool strict = true;  // refuse a file that lacks a tensor of the module, or has more (with this prefix)
};

class SafetensorsFile {
 public:
  // CorruptError: it is not a safetensors file, or was cut off; names the file and the byte. Unavailable: it cannot be
  // read.
  explicit SafetensorsFile(const std::filesystem::path& path);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  std::vector<std::string> names() const;  // in the order of the file
  bool contains(const std::string& name) const;
  // On the CPU, contiguous, with the file's dtype. InvalidArgument if there is none of this name, or libtorch lacks the
  // dtype. Two tensors of one name are the same memory.
  at::Tensor tensor(const std::string& name) const;
  // What the header says of a tensor, even of one whose dtype libtorch lacks. InvalidArgument if there is none of this
  // name.
  struct Form {
    std::string dtype_in_file;                         // "F32"
    at::ScalarType dtype = at::ScalarType::Undefined;  // if libtorch lacks it
    std::vector<int64_t> sizes;
    uint64_t bytes = 0;
  };
  Form form(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const;

  // Copies into the parameters and buffers, and converts dtypes. If their names or shapes differ, throws
  // InvalidArgument, which lists the names, and changes nothing. A tensor with two names in the module needs one of
  // them. In a module of FullyShardedDataParallel, a rank writes what it owns; every rank calls this, between two calls
  // of synchronize().
  void load_into(torch::nn::Module& module, const SafetensorsLoadOptions& options = {}) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Write the file under another name, sync it, and rename it: a file of this name is complete or absent.
// InvalidArgument: a tensor is sparse, quantized or without values, of a dtype that the format lacks (complex128), or
// its name is not UTF-8. Unavailable: it cannot be written.
void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});
// All parameters and buffers. In a module of FullyShardedDataParallel, one rank calls it between two calls of
// synchronize(); with kFullShard, after gather().
void save_safetensors(const std::filesystem::path& path, const torch::nn::Module& module,
                      const std::map<std::string, std::string>& metadata = {});

}  // namespace muster
