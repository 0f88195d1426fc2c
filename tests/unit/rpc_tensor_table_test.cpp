// Tensors to pieces and back: what is kept, what is shared, whose memory may be given away, and what is refused.
#include "rpc/values/tensor_table.h"

#include <ATen/ATen.h>
#include <ATen/quantized/QTensorImpl.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>

#include "muster/base/error.h"
#include "muster/comm/heap.h"
#include "shm/arena.h"
#include "support/sanitized.h"

namespace muster::rpc::detail {
namespace {

using test::kSanitized;
using transport::Piece;

struct Wire {
  std::string body;
  std::vector<Piece> pieces;
};

Wire written(std::vector<at::Tensor> tensors) {
  Wire wire;
  write_tensors(tensors, wire.body, wire.pieces);
  EXPECT_TRUE(tensors.empty());
  return wire;
}
std::vector<at::Tensor> read(Wire& wire) {
  WireReader reader(wire.body);
  auto tensors = read_tensors(reader, wire.pieces);
  reader.expect_done();
  return tensors;
}
// What a transport that copies delivers: fresh memory, with an owner or only for the call.
Wire copied(const Wire& wire, bool owned, std::vector<std::shared_ptr<std::byte[]>>& keep) {
  Wire there{wire.body, {}};
  for (const Piece& piece : wire.pieces) {
    std::shared_ptr<std::byte[]> memory(new std::byte[piece.bytes]);
    std::copy_n(piece.data, piece.bytes, memory.get());
    there.pieces.push_back({memory.get(), piece.bytes, owned ? memory : nullptr, false});
    if (!owned) keep.push_back(memory);
  }
  return there;
}
std::vector<at::Tensor> there_and_back(std::vector<at::Tensor> tensors, bool owned) {
  std::vector<std::shared_ptr<std::byte[]>> keep;
  Wire wire = copied(written(std::move(tensors)), owned, keep);
  auto got = read(wire);
  for (const auto& memory : keep) std::fill_n(memory.get(), 1, std::byte{0xee});  // the transport reuses its memory
  return got;
}

// Quantized with a scale and a zero point for each row.
at::Tensor by_channel(const at::Tensor& values, at::ScalarType dtype, at::ScalarType of_zero_points = at::kLong) {
  const at::Tensor zero_points = at::arange(values.size(0), at::kLong).to(of_zero_points);
  return at::quantize_per_channel(values, at::linspace(0.1, 0.3, values.size(0)), zero_points, 0, dtype);
}

class RpcTensors : public testing::TestWithParam<bool> {};  // whether the pieces have owners
INSTANTIATE_TEST_SUITE_P(Rpc, RpcTensors, testing::Bool(),
                         [](const auto& info) { return info.param ? "in_place" : "copied"; });

TEST_P(RpcTensors, EveryDtypeAndShape) {
  for (int number = 0; number < static_cast<int>(at::ScalarType::NumOptions); ++number) {
    const auto dtype = static_cast<at::ScalarType>(number);
    if (at::isQIntType(dtype)) continue;
    at::Tensor tensor;
    try {
      tensor = at::arange(0, 24, at::kFloat).to(at::kInt).to(dtype).reshape({2, 3, 4});
    } catch (const c10::Error&) {
      continue;  // the dtype has no dense tensors
    }
    for (const auto& each :
         {tensor, tensor[0][0][1], tensor.narrow(2, 0, 0), tensor.permute({2, 0, 1}), tensor.slice(1, 0, 3, 2)}) {
      const auto got = there_and_back({each}, GetParam()).at(0);
      ASSERT_EQ(got.scalar_type(), dtype);
      ASSERT_EQ(got.sizes(), each.sizes());
      const auto bytes = [](const at::Tensor& t) { return t.contiguous().view(at::kByte); };
      if (each.dim() > 0) {
        EXPECT_TRUE(at::equal(bytes(got), bytes(each))) << dtype;
      }
    }
  }
  for (const auto& sizes :
       std::vector<std::vector<int64_t>>{{}, {0}, {1}, {0, 3}, {1, 1, 1}, {7, 5}, {2, 3, 4, 5, 6}}) {
    const auto tensor = at::randn(sizes);
    EXPECT_TRUE(at::equal(there_and_back({tensor}, GetParam()).at(0), tensor));
  }
}

// Those that no operator converts to.
TEST_P(RpcTensors, DtypesOfOpaqueBytes) {
  for (const auto dtype : {at::ScalarType::Bits8, at::ScalarType::Bits1x8, at::ScalarType::Bits4x2,
                           at::ScalarType::UInt4, at::ScalarType::Int7, at::ScalarType::Float4_e2m1fn_x2}) {
    const at::Tensor bytes = at::arange(6, at::kByte);
    const at::Tensor got = there_and_back({bytes.view(dtype)}, GetParam()).at(0);
    EXPECT_EQ(got.scalar_type(), dtype);
    EXPECT_TRUE(at::equal(got.view(at::kByte), bytes)) << dtype;
  }
}

TEST_P(RpcTensors, QuantizedTensors) {
  const at::Tensor values = at::randn({3, 4, 5});
  std::vector<at::Tensor> all;
  for (const auto dtype : {at::kQInt8, at::kQUInt8, at::kQInt32}) {
    const at::Tensor tensor = at::quantize_per_tensor(values, 0.1, 3, dtype);
    all.insert(all.end(), {tensor, tensor.slice(2, 0, 5, 2), tensor.permute({2, 0, 1}), tensor[0][0][0], tensor[1]});
    all.push_back(at::quantize_per_tensor(at::empty({0, 2}), 0.5, 0, dtype));
    all.push_back(by_channel(values, dtype));
  }
  all.push_back(by_channel(values, at::kQUInt8, at::kFloat));
  const auto got = there_and_back(all, GetParam());
  ASSERT_EQ(got.size(), all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    SCOPED_TRACE(i);
    EXPECT_EQ(got[i].scalar_type(), all[i].scalar_type());
    EXPECT_EQ(got[i].sizes(), all[i].sizes());
    EXPECT_EQ(got[i].qscheme(), all[i].qscheme());
    EXPECT_TRUE(at::get_qtensorimpl(got[i])->quantizer()->equalTo(at::get_qtensorimpl(all[i])->quantizer()));
    EXPECT_TRUE(at::equal(got[i].int_repr(), all[i].int_repr()));
    EXPECT_TRUE(at::equal(got[i].dequantize(), all[i].dequantize()));
  }
  EXPECT_EQ(got[2].strides(), all[2].strides());

  // Views share their piece, and the same tensor comes once.
  Wire wire = written({all[0], all[4], all[0]});
  EXPECT_EQ(wire.pieces.size(), 1u);
  const auto views = read(wire);
  EXPECT_TRUE(views[1].is_alias_of(views[0]));
  EXPECT_TRUE(views[2].is_alias_of(views[0]));
}

TEST_P(RpcTensors, StridesAreKeptWhereDense) {
  const auto image = at::randn({2, 3, 4, 5});
  for (const auto& tensor :
       {image.contiguous(at::MemoryFormat::ChannelsLast), image.transpose(0, 3), image.permute({3, 1, 0, 2}),
        image.narrow(0, 1, 1), at::empty_strided({0, 3}, {7, 2}), at::empty_strided({1, 3}, {99, 1}).fill_(1)}) {
    const auto got = there_and_back({tensor}, GetParam()).at(0);
    EXPECT_EQ(got.strides(), tensor.strides());
    EXPECT_TRUE(at::equal(got, tensor));
  }
  // Tensors with gaps, or with the same element twice, arrive row by row.
  for (const auto& tensor : {image.slice(3, 0, 5, 2), at::randn({3}).expand({4, 3}), image.narrow(1, 0, 2)}) {
    const auto got = there_and_back({tensor}, GetParam()).at(0);
    EXPECT_TRUE(got.is_contiguous());
    EXPECT_TRUE(at::equal(got, tensor));
  }
}

TEST_P(RpcTensors, FlagsAndUndefinedOnes) {
  const auto leaf = at::randn({3}).requires_grad_();
  const auto got =
      there_and_back({at::Tensor(), leaf, leaf * 2, leaf.detach(), at::ones({0}).requires_grad_()}, GetParam());
  EXPECT_FALSE(got[0].defined());
  EXPECT_TRUE(got[1].requires_grad() && got[1].is_leaf());
  EXPECT_TRUE(got[2].requires_grad() && got[2].is_leaf());
  EXPECT_FALSE(got[3].requires_grad());
  EXPECT_TRUE(got[4].requires_grad());
  (got[1] * got[1]).sum().backward();
  EXPECT_TRUE(at::equal(got[1].grad(), leaf * 2));
  EXPECT_TRUE(there_and_back({}, GetParam()).empty());
}

TEST_P(RpcTensors, WhatSharesMemorySharesItThere) {
  const auto base = at::arange(100, at::kInt);
  Wire wire = written({base.slice(0, 10, 30), base.slice(0, 20, 40), base.slice(0, 20, 30), base.slice(0, 90, 95)});
  ASSERT_EQ(wire.pieces.size(), 2u);  // 10 to 40, and 90 to 95
  EXPECT_EQ(wire.pieces[0].bytes + wire.pieces[1].bytes, (30 + 5) * sizeof(int));
  const auto got =
      there_and_back({base.slice(0, 10, 30), base.slice(0, 20, 40), base.slice(0, 20, 30), base}, GetParam());
  got[0].fill_(-1);
  EXPECT_TRUE(at::equal(got[2], at::full({10}, -1, at::kInt)));
  EXPECT_EQ(got[1][9].item<int>(), -1);
  EXPECT_EQ(got[1][10].item<int>(), 30);
  EXPECT_EQ(got[3][10].item<int>(), -1);
  EXPECT_EQ(base[10].item<int>(), 10);
}

TEST_P(RpcTensors, OverlapsOfSeveralDtypesStayAligned) {
  const auto bytes = at::arange(64, at::kByte);
  const auto doubles = bytes.view(at::kDouble);
  const auto got = there_and_back({bytes.slice(0, 13, 30), doubles.slice(0, 2, 4)}, GetParam());
  EXPECT_TRUE(at::equal(got[0], bytes.slice(0, 13, 30)));
  EXPECT_TRUE(at::equal(got[1].view(at::kByte), bytes.slice(0, 16, 32)));
  got[1].view(at::kByte).zero_();
  EXPECT_EQ(got[0][4].item<int>(), 0);
}

TEST(RpcTensors, AViewComesWithoutTheRestOfItsStorage) {
  const auto big = at::zeros({1'000'000});
  const Wire wire = written({big.slice(0, 500, 510)});
  ASSERT_EQ(wire.pieces.size(), 1u);
  EXPECT_EQ(wire.pieces[0].bytes, 40u);
  EXPECT_EQ(wire.pieces[0].data, static_cast<std::byte*>(big.data_ptr()) + 2000);
}

TEST(RpcTensors, OneThatIsCopiedIsCopiedOnceEvenIfItIsThereTwice) {
  const auto gaps = at::arange(10).slice(0, 0, 10, 2);
  Wire wire = written({gaps, gaps});
  EXPECT_EQ(wire.pieces.size(), 1u);
  const auto got = read(wire);
  got[0].zero_();
  EXPECT_TRUE(at::equal(got[1], at::zeros({5}, at::kLong)));
}

TEST(RpcTensors, ConjugatesAndNegativesAreResolved) {
  const auto value = at::complex(at::randn({3}), at::randn({3}));
  Wire wire = written({value.conj(), at::imag(value.conj())});
  const auto got = read(wire);
  EXPECT_TRUE(at::equal(got[0], value.conj().resolve_conj()));
  EXPECT_TRUE(at::equal(got[1], at::imag(value.conj()).resolve_neg()));
  Wire zero = written({at::_efficientzerotensor({3})});
  EXPECT_TRUE(at::equal(read(zero)[0], at::zeros({3})));
}

TEST(RpcTensors, RefusedBeforeAnythingIsDone) {
  const std::vector<at::Tensor> bad{at::eye(3).to_sparse(),
                                    by_channel(at::ones({3, 4}), at::kQUInt4x2, at::kFloat),
                                    by_channel(at::ones({3, 4}), at::kQInt8).view({12}),
                                    at::empty({3}, at::kQInt8),
                                    at::empty({3}, at::kMeta),
                                    at::_nested_tensor_from_tensor_list({at::ones({2}), at::ones({3})})};
  for (const auto& tensor : bad) {
    std::vector<at::Tensor> tensors{at::ones({1}), tensor};
    std::string body = "head";
    std::vector<Piece> pieces;
    EXPECT_THROW(write_tensors(tensors, body, pieces), InvalidArgument);
    EXPECT_EQ(body, "head");
    EXPECT_TRUE(pieces.empty());
    EXPECT_EQ(tensors.size(), 2u);
  }
  auto freed = at::ones({100});
  freed.storage().unsafeGetStorageImpl()->set_nbytes(0);
  EXPECT_THROW(written({freed}), InvalidArgument);
}

bool unique(std::vector<at::Tensor> tensors) {
  const Wire wire = written(std::move(tensors));
  bool all = true;
  for (const auto& piece : wire.pieces) all &= piece.unique;
  return all;
}
template <typename... T>
bool moved_unique(T... tensors) {  // no initializer list, which would keep copies
  std::vector<at::Tensor> list;
  (list.push_back(std::move(tensors)), ...);
  return unique(std::move(list));
}

TEST(RpcUnique, OnlyIfNobodyElseCanReachTheMemory) {
  EXPECT_TRUE(moved_unique(at::ones({3})));
  at::Tensor kept = at::ones({3});
  kept.requires_grad_();
  EXPECT_TRUE(moved_unique(std::move(kept)));
  kept = at::ones({3});
  EXPECT_FALSE(moved_unique(kept));           // a handle
  EXPECT_FALSE(moved_unique(kept.detach()));  // another tensor of the storage
  EXPECT_FALSE(moved_unique(kept.view({3, 1})));
  const c10::Storage storage = kept.storage();
  kept.reset();
  kept = at::ones({3});
  const at::Tensor view = kept.slice(0, 0, 1);
  EXPECT_FALSE(moved_unique(std::move(kept)));  // a view remains
  kept = at::ones({3});
  const c10::weak_intrusive_ptr<c10::TensorImpl> weak(kept.getIntrusivePtr());
  EXPECT_FALSE(moved_unique(std::move(kept)));  // the weak pointer could be locked
  const at::Tensor x = at::ones({3}).requires_grad_();
  at::Tensor saved = x.exp();
  const at::Tensor loss = saved.sum();  // exp's backward keeps its result
  EXPECT_FALSE(moved_unique(std::move(saved)));
  // Memory that does not belong to the storage.
  float array[4] = {};
  EXPECT_FALSE(moved_unique(at::from_blob(array, {4})));
  EXPECT_FALSE(moved_unique(at::from_blob(array, {4}, [](void*) {})));
  EXPECT_FALSE(moved_unique(at::_lazy_clone(at::ones({4}))));
  const at::Tensor original = at::ones({4});
  EXPECT_FALSE(moved_unique(at::_lazy_clone(original)));  // copied on write, shared until then
  EXPECT_EQ(original.sum().item<float>(), 4);
}

TEST(RpcUnique, SeveralOfOneStorageCountTogether) {
  at::Tensor a = at::ones({6});
  at::Tensor b = a.detach();
  EXPECT_TRUE(moved_unique(std::move(a), std::move(b)));
  a = at::ones({6});
  EXPECT_FALSE(moved_unique(a, a, a));
  b = a;
  EXPECT_TRUE(moved_unique(std::move(a), std::move(b)));  // two handles of one tensor
  // Two ranges of one storage: neither piece may take it away.
  a = at::ones({100});
  b = a.detach();
  c10::TensorImpl* const second = b.unsafeGetTensorImpl();
  a.unsafeGetTensorImpl()->set_sizes_contiguous({10});
  second->set_sizes_contiguous({10});
  second->set_storage_offset(50);
  const Wire wire = [&] {
    std::vector<at::Tensor> list;
    list.push_back(std::move(a));
    list.push_back(std::move(b));
    return written(std::move(list));
  }();
  ASSERT_EQ(wire.pieces.size(), 2u);
  EXPECT_FALSE(wire.pieces[0].unique);
  EXPECT_FALSE(wire.pieces[1].unique);
}

TEST(RpcUnique, CopiesThatAreMadeOnTheWayAre) {
  const at::Tensor kept = at::ones({6});
  EXPECT_TRUE(moved_unique(kept.slice(0, 0, 6, 2)));
}

TEST(RpcUnique, OwnersKeepTheMemoryAndReleaseIt) {
  bool gone = false;
  {
    alignas(16) static float array[4] = {1, 2, 3, 4};
    Wire wire = written({at::from_blob(array, {4}, [&gone](void*) { gone = true; })});
    EXPECT_FALSE(gone);
    EXPECT_EQ(reinterpret_cast<float*>(wire.pieces[0].data), array);
    auto got = read(wire);
    wire.pieces.clear();
    EXPECT_FALSE(gone);
    EXPECT_EQ(got[0].data_ptr(), array);  // in place
    // It may be sent on without a copy: it has the only owner.
    EXPECT_TRUE(unique(std::move(got)));
  }
  EXPECT_TRUE(gone);
}

TEST(RpcUnique, ReceivedMemoryThatOthersHoldIsNot) {
  Wire wire = written({at::ones({4})});
  const auto another = wire.pieces[0].owner;
  EXPECT_FALSE(unique(read(wire)));
}

TEST(RpcTensors, ReceivedOnesCanBeResized) {
  Wire wire = written({at::arange(4, at::kFloat), at::ones({0})});
  auto got = read(wire);
  got[0].resize_({1000});
  EXPECT_EQ(got[0][3].item<float>(), 3);
  got[0].fill_(1);
  got[1].resize_({5}).fill_(2);
  EXPECT_EQ(got[1].sum().item<float>(), 10);
  got[0].set_(got[1]);
}

// --- what comes from a peer that breaks the rules ---

std::vector<at::Tensor> read_bytes(const std::string& body, size_t piece_bytes = 64) {
  std::vector<Piece> pieces;
  const std::shared_ptr<std::byte[]> memory(new std::byte[piece_bytes]());
  if (piece_bytes) pieces.push_back({memory.get(), piece_bytes, memory, false});
  WireReader reader(body);
  return read_tensors(reader, pieces);
}
std::string row(uint8_t flags, at::ScalarType dtype, const std::vector<int64_t>& sizes,
                const std::vector<int64_t>& strides = {}, uint32_t piece = 0, uint64_t offset = 0) {
  WireWriter writer;
  writer.put(uint32_t{1}).put(flags).put(static_cast<uint8_t>(dtype)).put(static_cast<uint8_t>(sizes.size()));
  for (const int64_t number : sizes) writer.put(number);
  for (const int64_t number : strides) writer.put(number);
  writer.put(piece).put(offset);
  return writer.take();
}

TEST(RpcTensors, EveryNumberIsChecked) {
  constexpr int64_t kBig = int64_t{1} << 62;
  EXPECT_EQ(read_bytes(row(1, at::kFloat, {2, 8})).at(0).numel(), 16);  // 64 bytes: exactly the piece
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {17})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {2, 8}, {}, 0, 4)), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {1}, {}, 0, 2)), CorruptError);  // begins within an element
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {1}, {}, 0, UINT64_MAX - 3)), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {1}, {}, 1, 0)), CorruptError);  // there is no piece 1
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {-1})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {kBig, kBig})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kFloat, {0, kBig, kBig})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kDouble, {kBig})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, at::kQInt8, {1})), CorruptError);  // its integers come, with kQuantized
  EXPECT_THROW(read_bytes(row(1, at::ScalarType::Undefined, {1})), CorruptError);
  EXPECT_THROW(read_bytes(row(1, static_cast<at::ScalarType>(200), {1})), CorruptError);
  EXPECT_THROW(read_bytes(row(3, at::kLong, {1})), CorruptError);      // an integer with a gradient
  EXPECT_THROW(read_bytes(row(2, at::kFloat, {1})), CorruptError);     // undefined, with properties
  EXPECT_THROW(read_bytes(row(0x81, at::kFloat, {1})), CorruptError);  // unknown flags
  EXPECT_THROW(read_bytes(row(1, at::kFloat, std::vector<int64_t>(65, 1))), CorruptError);
  EXPECT_EQ(read_bytes(row(1, at::kFloat, std::vector<int64_t>(64, 1))).at(0).dim(), 64);
  EXPECT_EQ(read_bytes(row(5, at::kFloat, {2, 8}, {1, 2})).at(0).stride(1), 2);
  for (const std::vector<int64_t>& strides : {std::vector<int64_t>{8, 2}, {1, 1}, {0, 1}, {-8, 1}, {9, 1}, {kBig, 1}})
    EXPECT_THROW(read_bytes(row(5, at::kFloat, {2, 8}, strides)), CorruptError);
  EXPECT_THROW(read_bytes(row(5, at::kFloat, {1}, {INT64_MAX})), CorruptError);
  EXPECT_THROW(read_bytes(std::string("\xff\xff\xff\xff", 4)), CorruptError);
  EXPECT_THROW(read_bytes(""), CorruptError);
  for (size_t cut = 1; cut < row(1, at::kFloat, {2, 8}).size(); ++cut) {
    std::string shorter = row(1, at::kFloat, {2, 8});
    shorter.resize(shorter.size() - cut);
    EXPECT_THROW(read_bytes(shorter), CorruptError) << cut;
  }
}

TEST(RpcTensors, EveryNumberOfAQuantizedOneIsChecked) {
  const auto quantized = [](at::ScalarType dtype, const std::vector<int64_t>& sizes, const std::string& rest) {
    return row(17, dtype, sizes) + rest;
  };
  const std::string number(8, '\0'), two = number + number;
  EXPECT_EQ(read_bytes(quantized(at::kChar, {4}, '\0' + two)).at(0).scalar_type(), at::kQInt8);
  EXPECT_EQ(read_bytes(quantized(at::kInt, {2, 4}, std::string("\1\0", 2) + two + two)).at(0).dim(), 2);
  EXPECT_THROW(read_bytes(quantized(at::kFloat, {4}, '\0' + two)), CorruptError);
  EXPECT_THROW(read_bytes(quantized(at::kQInt8, {4}, '\0' + two)), CorruptError);
  EXPECT_THROW(read_bytes(quantized(at::kChar, {4}, '\0' + number)), CorruptError);
  const std::string large = number + std::string("\x80\0\0\0\0\0\0\0", 8);  // a zero point of 128
  EXPECT_THROW(read_bytes(quantized(at::kChar, {4}, '\0' + large)), CorruptError);
  EXPECT_EQ(read_bytes(quantized(at::kByte, {4}, '\0' + large)).at(0).q_zero_point(), 128);
  EXPECT_THROW(read_bytes(quantized(at::kChar, {4}, '\2' + two)), CorruptError);  // a scheme that no tensor has
  EXPECT_THROW(read_bytes(quantized(at::kChar, {4}, '\x7f' + two)), CorruptError);
  EXPECT_THROW(read_bytes(quantized(at::kInt, {2, 4}, std::string("\1\2", 2) + two + two)), CorruptError);
  EXPECT_THROW(read_bytes(quantized(at::kInt, {2, 4}, std::string("\1\0", 2) + two)), CorruptError);
}

TEST(RpcTensors, MemoryAtAnOddAddressIsCopied) {
  Wire wire = written({at::arange(4, at::kDouble)});
  const std::shared_ptr<std::byte[]> memory(new std::byte[40]);
  std::copy_n(wire.pieces[0].data, 32, memory.get() + 1);
  wire.pieces[0] = {memory.get() + 1, 32, memory, false};
  const auto got = read(wire);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(got[0].data_ptr()) % 8, 0u);
  EXPECT_TRUE(at::equal(got[0], at::arange(4, at::kDouble)));
}

TEST(RpcTensors, FuzzedTablesAreCorruptAtWorst) {
  std::mt19937 random(11);
  const auto image = at::zeros({2, 2, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast);
  const Wire good =
      written({image, at::Tensor(), at::zeros({5}).requires_grad_(), at::empty({0, 2}), image[0],
               at::quantize_per_tensor(at::ones({4}), 0.1, 0, at::kQInt8), by_channel(at::ones({3, 4}), at::kQUInt8)});
  uint64_t sum = 0;
  for (int round = 0; round < 20'000; ++round) {
    Wire wire = good;
    for (size_t change = random() % 4 + 1; change > 0; --change) {
      const size_t at = random() % wire.body.size();
      switch (random() % 3) {
        case 0:
          wire.body[at] = static_cast<char>(random());
          break;
        case 1:
          wire.body[at] = static_cast<char>(wire.body[at] ^ (1 << random() % 8));
          break;
        default:
          wire.body.erase(at, random() % 9);
      }
      if (wire.body.empty()) break;
    }
    try {
      WireReader reader(wire.body);
      for (const auto& tensor : read_tensors(reader, wire.pieces)) {
        if (!tensor.defined()) continue;
        const auto* const bytes = static_cast<const uint8_t*>(tensor.const_data_ptr());
        sum += std::accumulate(bytes, bytes + tensor.nbytes(), uint64_t{0});  // touches every byte that it claims
        if (tensor.is_quantized()) tensor.dequantize();
      }
    } catch (const CorruptError&) {
    }
  }
  EXPECT_GT(sum, 0u);
}

}  // namespace
}  // namespace muster::rpc::detail
