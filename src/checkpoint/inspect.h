// What `muster checkpoint` does: looks into snapshots, other safetensors files and files of torch.save(), without the
// training and on one process.
//
// A path is a file, or a folder of snapshots, which stands for its newest one. A snapshot of several files is one: its
// manifest stands for all.
//
// Errors: CorruptError and Unavailable, as those of Container and SafetensorsFile; those of torch_file.h;
// InvalidArgument for a path that is none of these. Thread-safety: all functions.
#pragma once

#include <exception>
#include <string>
#include <vector>

namespace muster::checkpoint {

struct Inspection {
  bool good = true;
  std::string words;  // lines for people
};

// Of a folder: its snapshots. Of a file: its tensors, with dtype, shape and bytes. Of safetensors files and snapshots,
// only headers are read.
Inspection list(const std::string& path);

// Reads every byte of each file, or of all snapshots in a folder, and compares it with its checksum. A file without
// checksums is only parsed. Bad if one is corrupt.
Inspection verify(const std::vector<std::string>& paths);

// Tensors that one of them lacks, that have other shapes or dtypes, or other values; good if there are none.
// `tolerance`: absolute difference of values, and of both parts of complex ones, that does not count; 0: to the bit.
Inspection diff(const std::string& a, const std::string& b, double tolerance = 0);

struct ConvertOptions {
  std::string prefix;       // only tensors whose names begin with it, and without it
  bool overwrites = false;  // a target that exists
};
// From safetensors files and snapshots to a file that torch.load() reads (a dictionary of tensors), if `target` does
// not end with ".safetensors"; else from such files of torch.save(), or from safetensors files, to a safetensors file.
// Several sources are put together. InvalidArgument if two have a tensor of the same name, or one holds something else
// than tensors.
Inspection convert(const std::vector<std::string>& sources, const std::string& target,
                   const ConvertOptions& options = {});

// What went wrong, in one line for people.
std::string words_for_error(const std::exception& error);

// What the program muster-checkpoint answers: its status, standard output and standard error. Its arguments, which the
// muster command has checked:
//   ls PATH | verify PATH... | diff TOLERANCE A B | convert PREFIX OVERWRITES TARGET SOURCE...
struct Answer {
  int status = 0;
  std::string out, err;
};
Answer answer(std::vector<std::string> words);

}  // namespace muster::checkpoint
