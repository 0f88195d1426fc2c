// Reader for idx files, the format of MNIST and its family, plain or packed with gzip.
//
// The format: two zero bytes, a type byte (8: unsigned bytes, the only one read here), the number of dimensions, each
// dimension as a big-endian 32-bit number, then the elements, row by row. A file is read whole, and believed only as
// far as its bytes reach: memory grows with the data that arrives, never with what a header claims.
//
// Errors: Corrupt names the file and the byte (of the unpacked data, where it is packed) at which it stops making
// sense; Unavailable, a file that is not there or cannot be read.
//
// Thread-safety: all functions. Source: http://yann.lecun.com/exdb/mnist; Xiao, Rasul and Vollgraf, "Fashion-MNIST",
// 2017.
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>

namespace muster {

// The file's elements: a uint8 tensor of the file's shape.
at::Tensor read_idx(const std::filesystem::path& path);

enum class FashionMnistPart { kTrain, kTest };

struct FashionMnist {
  at::Tensor images;  // N x 28 x 28, uint8
  at::Tensor labels;  // N, int64, 0 to 9
};

// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte.gz, or the same without .gz, from a folder; checks that they
// belong together. The names are those of all of the family, so MNIST itself can be read as well.
FashionMnist load_fashion_mnist(const std::filesystem::path& folder, FashionMnistPart part);

}  // namespace muster
