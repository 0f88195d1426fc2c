// Reader for idx files, the format of MNIST and its family, plain or packed with gzip.
//
// The format: two zero bytes, a type byte (8: unsigned bytes, the only one read here), the number of dimensions, each
// dimension as a big-endian 32-bit number, then the elements, row by row. The whole file is read. Memory grows with the
// bytes that the file holds, never with the size that its header claims.
//
// Errors: CorruptError names the file and the first byte that is wrong (its offset in the unpacked data if the file is
// packed); Unavailable if the file does not exist or cannot be read.
//
// Thread-safety: any number of threads may call these functions. Source: http://yann.lecun.com/exdb/mnist; Xiao, Rasul
// and Vollgraf, "Fashion-MNIST", 2017.
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

// Reads {train,t10k}-{images-idx3,labels-idx1}-ubyte.gz, or the same without .gz, from a folder, and checks that there
// are as many labels as images. MNIST and its other descendants use the same names, so they can be read as well.
FashionMnist load_fashion_mnist(const std::filesystem::path& folder, FashionMnistPart part);

}  // namespace muster
