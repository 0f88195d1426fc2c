// The idx reader: what it reads, and that no bytes make it crash, hang or allocate memory without bound.
#include "muster/data/idx.h"

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <zlib.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"
#include "support/idx_bytes.h"

namespace muster {
namespace {

namespace fs = std::filesystem;
using test::idx;

std::string gzip(const std::string& bytes) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, bytes.size()), 0);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string some_bytes(size_t count, uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::string bytes(count, 0);
  for (auto& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

size_t virtual_peak() {  // bytes
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmPeak:")) return std::stoull(line.substr(7)) * 1024;
  }
  return 0;
}

class Idx : public testing::Test {
 protected:
  Idx() {
    std::string pattern = (fs::temp_directory_path() / "idx-test-XXXXXX").string();
    folder_ = ::mkdtemp(pattern.data());
  }
  ~Idx() override { fs::remove_all(folder_); }

  fs::path write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
    return folder_ / name;
  }
  // The message of the CorruptError that reading these bytes throws.
  std::string corrupt(const std::string& bytes) {
    const auto path = write("file", bytes);
    try {
      read_idx(path);
    } catch (const CorruptError& error) {
      EXPECT_NE(error.message().find(path.string()), std::string::npos) << error.what();
      return error.message().substr(path.string().size());
    }
    ADD_FAILURE() << "no error";
    return "";
  }

  fs::path folder_;
};

TEST_F(Idx, ReadsPlainAndPackedFiles) {
  const auto data = some_bytes(2 * 3 * 5);
  for (const auto& bytes : {idx({2, 3, 5}, data), gzip(idx({2, 3, 5}, data))}) {
    const auto tensor = read_idx(write("file", bytes));
    EXPECT_EQ(tensor.sizes(), (at::IntArrayRef{2, 3, 5}));
    ASSERT_EQ(tensor.scalar_type(), at::kByte);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor.const_data_ptr()), 30), data);
  }
  EXPECT_EQ(read_idx(write("empty", idx({0, 7}, ""))).sizes(), (at::IntArrayRef{0, 7}));
  const auto large = some_bytes(3'000'001);  // more than one step of the reader
  const auto tensor = read_idx(write("large", gzip(idx({3'000'001}, large))));
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor.const_data_ptr()), large.size()), large);
}

TEST_F(Idx, NamesTheByteThatIsWrong) {
  const auto good = idx({2, 3}, "abcdef");
  EXPECT_EQ(corrupt(""), ", byte 0: the file ends here, within the first 4 bytes");
  EXPECT_EQ(corrupt("hello world"), ", byte 0: not an idx file, which begins with two zero bytes");
  EXPECT_EQ(corrupt(idx({2, 3}, "abcdef", 13)), ", byte 2: elements of type 13; only 8, unsigned bytes, can be read");
  EXPECT_EQ(corrupt(idx({}, "")), ", byte 3: no dimensions; an idx file has 1 or more");
  EXPECT_EQ(corrupt(good.substr(0, 10)), ", byte 10: the file ends within dimension 2 of 2");
  EXPECT_EQ(corrupt(good.substr(0, 17)),
            ", byte 17: the file ends here, with 5 of the 6 elements that its dimensions 2 x 3 promise");
  EXPECT_EQ(corrupt(good + "g"),
            ", byte 18: bytes follow the last of the 6 elements that the dimensions 2 x 3 promise");
  EXPECT_EQ(
      corrupt(gzip(good + "g")),
      ", byte 18 of the unpacked data: bytes follow the last of the 6 elements that the dimensions 2 x 3 promise");
  auto packed = gzip(good);
  packed[packed.size() - 6] ^= 1;  // in the check sum
  EXPECT_EQ(corrupt(packed), text(", byte ", packed.size() - 4, ": the gzip data breaks off (incorrect data check)"));
  EXPECT_EQ(corrupt(gzip(good).substr(0, 30)), ", byte 30: the gzip data breaks off (unexpected end of file)");
}

TEST_F(Idx, TakesNoMemoryOnAHeadersWord) {
  const size_t before = virtual_peak();
  for (const auto& shape : {std::vector<uint32_t>{0x7FFFFFFF}, {0xFFFFFFFF, 0x7FFFFFFF}, {1 << 20, 1 << 20}}) {
    for (const auto& bytes : {idx(shape, "abc"), gzip(idx(shape, "abc"))}) {
      EXPECT_NE(corrupt(bytes).find("with 3 of the"), std::string::npos);
    }
  }
  const auto too_many = corrupt(idx({0xFFFFFFFF, 0xFFFFFFFF, 2}, "abc"));
  EXPECT_EQ(too_many, ", byte 8: the dimensions' product is more than any file holds");
  // A zero among the sizes does not make the others harmless: strides are products too.
  EXPECT_NE(corrupt(idx({0, 0xFFFFFFFF, 0xFFFFFFFF, 2}, "")).find("product"), std::string::npos);
  EXPECT_LT(virtual_peak() - before, size_t{64} << 20);
}

TEST_F(Idx, SurvivesEveryTruncationAndRandomDamage) {
  const auto data = some_bytes(300);
  const auto plain = idx({3, 10, 10}, data), packed = gzip(plain);
  const auto whole = read_idx(write("file", plain));
  for (const auto* bytes : {&plain, &packed}) {
    for (size_t length = 0; length < bytes->size(); ++length) corrupt(bytes->substr(0, length));
  }
  std::mt19937 random(7);
  int read = 0;
  for (int round = 0; round < 3000; ++round) {
    const bool is_packed = round % 2 == 0;
    auto bytes = is_packed ? packed : plain;
    for (int flips = 1 + static_cast<int>(random() % 3); flips > 0; --flips) {
      // Mostly the headers, where the structure is.
      const size_t at = random() % (round % 4 < 2 ? size_t{20} : bytes.size());
      bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
    }
    const auto path = write("file", bytes);
    try {
      const auto tensor = read_idx(path);
      ++read;
      EXPECT_EQ(tensor.numel(), 300);  // damage to the elements of a plain file cannot be seen
      // In a packed file damage goes unnoticed only where gzip stores no elements (its time, its system).
      EXPECT_TRUE(!is_packed || at::equal(tensor, whole));
    } catch (const CorruptError& error) {
      EXPECT_NE(error.message().find(path.string()), std::string::npos);
    }
  }
  EXPECT_GT(read, 100);
  EXPECT_LT(read, 2000);
}

TEST_F(Idx, SaysWhatIsMissing) {
  EXPECT_THROW(read_idx(folder_ / "none"), Unavailable);
  EXPECT_THROW(read_idx(folder_), Unavailable);
  const auto fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THROW(read_idx(fifo), Unavailable);  // and does not wait for a writer
  try {
    load_fashion_mnist(folder_, FashionMnistPart::kTest);
    ADD_FAILURE() << "no error";
  } catch (const Unavailable& error) {
    const std::string what = error.what();
    for (const auto* part : {"t10k-images-idx3-ubyte.gz is not there", "dataset-fashion-mnist", "--data"}) {
      EXPECT_NE(what.find(part), std::string::npos) << what;
    }
  }
}

TEST_F(Idx, ChecksThatImagesAndLabelsBelongTogether) {
  const auto images = idx({3, 28, 28}, some_bytes(3 * 28 * 28));
  const auto labels = idx({3}, std::string{0, 9, 4});
  write("train-images-idx3-ubyte", images);
  write("train-labels-idx1-ubyte.gz", gzip(labels));
  const auto data = load_fashion_mnist(folder_, FashionMnistPart::kTrain);
  EXPECT_EQ(data.images.sizes(), (at::IntArrayRef{3, 28, 28}));
  EXPECT_EQ(data.labels.scalar_type(), at::kLong);
  EXPECT_EQ(data.labels[1].item<int64_t>(), 9);

  const auto message = [&](const std::string& new_images, const std::string& new_labels) -> std::string {
    write("train-images-idx3-ubyte", new_images);
    write("train-labels-idx1-ubyte.gz", new_labels);
    try {
      load_fashion_mnist(folder_, FashionMnistPart::kTrain);
    } catch (const CorruptError& error) {
      return error.message();
    }
    return "no error";
  };
  EXPECT_NE(message(images, idx({2}, std::string{0, 9})).find("labels is of shape 2, and there are 3 images"),
            std::string::npos);
  EXPECT_NE(message(images, idx({3}, std::string{0, 9, 10})).find("image 2 has label 10; labels are 0 to 9"),
            std::string::npos);
  EXPECT_NE(message(images, idx({3, 1}, std::string{0, 9, 1})).find("labels is of shape 3 x 1"), std::string::npos);
  EXPECT_NE(message(idx({3, 4, 4}, some_bytes(48)), labels).find("images is of shape 3 x 4 x 4, not N x 28 x 28"),
            std::string::npos);
}

TEST(FashionMnist, IsTheRealOneWhereItIsInstalled) {
  const fs::path folder = "/usr/share/datasets/fashion-mnist";
  if (!fs::exists(folder)) GTEST_SKIP() << "needs the Debian package dataset-fashion-mnist";
  const auto test = load_fashion_mnist(folder, FashionMnistPart::kTest);
  EXPECT_EQ(test.images.sizes(), (at::IntArrayRef{10000, 28, 28}));
  EXPECT_EQ(test.labels.bincount().eq(1000).all().item<bool>(), true);
  const auto train = load_fashion_mnist(folder, FashionMnistPart::kTrain);
  EXPECT_EQ(train.images.size(0), 60000);
  EXPECT_NEAR(train.images.mean(at::kDouble).item<double>() / 255, 0.2860, 1e-4);
}

}  // namespace
}  // namespace muster
