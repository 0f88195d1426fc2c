#include "muster/data/idx.h"

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

constexpr size_t kStep = 1 << 20;  // bytes read at a time
constexpr const char* kFresh = "Fetch the file again";
constexpr const char* kWhereFrom =
    "The Debian package dataset-fashion-mnist brings Fashion-MNIST to /usr/share/datasets/fashion-mnist; give the "
    "folder "
    "of the same files elsewhere with --data DIR";

// A file as a stream of its unpacked bytes. zlib passes a file through unchanged if it does not begin like gzip.
class FileBytes {
 public:
  explicit FileBytes(const std::filesystem::path& path) : path_(path) {
    // O_NONBLOCK: opening a FIFO that has no writer must not block.
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    if (!fd) throw_errno(text("cannot open ", path.string()), "Check its name and permissions");
    struct stat status {};
    if (::fstat(fd.get(), &status) != 0) throw_errno(text("cannot read ", path.string()));
    if (!S_ISREG(status.st_mode))
      throw Unavailable(text(path.string(), " is not a file"), "Give the path of an idx file");
    file_.reset(::gzdopen(fd.get(), "rb"));
    if (!file_) throw Unavailable(text("no memory to read ", path.string()));
    fd.release();  // gzclose() closes it
    ::gzbuffer(file_.get(), 1 << 18);
  }

  // Fills `into`, or as much of it as the file has bytes for. Returns how many bytes that is.
  size_t read(std::span<uint8_t> into) {
    size_t done = 0;
    while (done < into.size()) {
      const auto want = static_cast<unsigned>(std::min(into.size() - done, kStep));
      const int got = ::gzread(file_.get(), into.data() + done, want);
      if (got > 0) done += static_cast<size_t>(got);
      // Only gzerror() reports that a packed file ends too early.
      int error = Z_OK;
      const char* reason = ::gzerror(file_.get(), &error);
      if (error == Z_ERRNO) throw_errno(text("cannot read ", path_.string()));
      if (error != Z_OK) {
        // zlib puts the descriptor's number before its reason. It unpacks ahead, so the offset that the error names is
        // one in the packed file.
        const char* colon = std::strstr(reason, ": ");
        throw CorruptError(text(path_.string(), ", byte ", ::gzoffset(file_.get()), ": the gzip data breaks off (",
                                colon != nullptr ? colon + 2 : reason, ")"),
                           kFresh);
      }
      if (got <= 0) break;
    }
    offset_ += done;
    return done;
  }

  size_t offset() const { return offset_; }

  [[noreturn]] void corrupt(size_t offset, const std::string& why) const {
    throw CorruptError(
        text(path_.string(), ", byte ", offset, ::gzdirect(file_.get()) != 0 ? "" : " of the unpacked data", ": ", why),
        kFresh);
  }

 private:
  struct Close {
    void operator()(gzFile file) const { ::gzclose_r(file); }
  };
  std::filesystem::path path_;
  std::unique_ptr<std::remove_pointer_t<gzFile>, Close> file_;
  size_t offset_ = 0;
};

std::vector<int64_t> read_shape(FileBytes& bytes) {
  std::array<uint8_t, 4> magic{};
  if (const auto got = bytes.read(magic); got < magic.size())
    bytes.corrupt(got, "the file ends here, within the first 4 bytes");
  if (magic[0] != 0 || magic[1] != 0) bytes.corrupt(0, "not an idx file, which begins with two zero bytes");
  if (magic[2] != 8) {
    bytes.corrupt(2, text("elements of type ", int{magic[2]}, "; only 8, unsigned bytes, can be read"));
  }
  if (magic[3] == 0) bytes.corrupt(3, "no dimensions; an idx file has 1 or more");

  std::vector<int64_t> shape;
  int64_t elements = 1;
  for (int d = 0; d < magic[3]; ++d) {
    std::array<uint8_t, 4> number{};
    const size_t start = bytes.offset();
    if (const auto got = bytes.read(number); got < number.size()) {
      bytes.corrupt(start + got, text("the file ends within dimension ", d + 1, " of ", int{magic[3]}));
    }
    int64_t length = 0;
    for (const auto byte : number) length = length << 8 | byte;
    // An empty dimension counts as 1: the strides of the others must fit into an int64_t, too.
    if (__builtin_mul_overflow(elements, std::max<int64_t>(length, 1), &elements)) {
      bytes.corrupt(start, "the dimensions' product is more than any file holds");
    }
    shape.push_back(length);
  }
  return shape;
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

at::Tensor read_either(const std::filesystem::path& folder, const std::string& name) {
  const auto packed = folder / (name + ".gz");
  const auto plain = folder / name;
  if (is_there(packed)) return read_idx(packed);
  if (is_there(plain)) return read_idx(plain);
  throw Unavailable(text(packed.string(), " is not there"), kWhereFrom);
}

}  // namespace

at::Tensor read_idx(const std::filesystem::path& path) {
  FileBytes bytes(path);
  const auto shape = read_shape(bytes);
  size_t elements = 1;
  for (const auto length : shape) elements *= static_cast<size_t>(length);

  std::vector<uint8_t> data;
  while (data.size() < elements) {
    const size_t before = data.size();
    data.resize(before + std::min(kStep, elements - before));
    const auto got = bytes.read(std::span(data).subspan(before));
    if (before + got < data.size()) {
      bytes.corrupt(bytes.offset(), text("the file ends here, with ", before + got, " of the ", elements,
                                         " elements that its dimensions ", join(shape, " x "), " promise"));
    }
  }
  // One read past the end also makes zlib verify the checksum.
  std::array<uint8_t, 1> extra{};
  const size_t end = bytes.offset();
  if (bytes.read(extra) != 0) {
    bytes.corrupt(end, text("bytes follow the last of the ", elements, " elements that the dimensions ",
                            join(shape, " x "), " promise"));
  }

  auto tensor = at::empty(shape, at::TensorOptions().dtype(at::kByte));
  if (!data.empty()) std::memcpy(tensor.mutable_data_ptr<uint8_t>(), data.data(), data.size());
  return tensor;
}

FashionMnist load_fashion_mnist(const std::filesystem::path& folder, FashionMnistPart part) {
  const std::string prefix = part == FashionMnistPart::kTrain ? "train" : "t10k";
  FashionMnist data;
  data.images = read_either(folder, prefix + "-images-idx3-ubyte");
  auto labels = read_either(folder, prefix + "-labels-idx1-ubyte");

  const auto where = text(folder.string(), ": ", prefix);
  if (data.images.dim() != 3 || data.images.size(1) != 28 || data.images.size(2) != 28) {
    throw CorruptError(text(where, "-images is of shape ", join(data.images.sizes(), " x "), ", not N x 28 x 28"),
                       kFresh);
  }
  if (labels.dim() != 1 || labels.size(0) != data.images.size(0)) {
    throw CorruptError(text(where, "-labels is of shape ", join(labels.sizes(), " x "), ", and there are ",
                            data.images.size(0), " images"),
                       kFresh);
  }
  const auto* begin = labels.const_data_ptr<uint8_t>();
  const auto* end = begin + labels.numel();
  if (const auto* bad = std::find_if(begin, end, [](uint8_t label) { return label > 9; }); bad != end) {
    throw CorruptError(text(where, "-labels: image ", bad - begin, " has label ", int{*bad}, "; labels are 0 to 9"),
                       kFresh);
  }
  data.labels = labels.to(at::kLong);
  return data;
}

}  // namespace muster
