// Objects: types that msgpack packs, and tensors in them, in every collective and message that takes objects.

#include "muster/comm/objects.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <map>
#include <optional>
#include <tuple>

#include "base/text.h"
#include "support/ranks.h"

namespace muster::test {

enum class Colour { kRed, kGreen };

struct Layer {
  std::string name;
  at::Tensor weight;
  MSGPACK_DEFINE(name, weight);
};

struct Everything {
  int64_t number = 0;
  double real = 0;
  bool flag = false;
  Colour colour = Colour::kRed;
  std::string text;
  std::vector<std::string> words;
  std::map<std::string, std::vector<double>> table;
  std::optional<int> there, missing;
  std::tuple<int, std::string, bool> triple;
  std::vector<Layer> layers;
  at::Tensor none;
  MSGPACK_DEFINE(number, real, flag, colour, text, words, table, there, missing, triple, layers, none);
};

}  // namespace muster::test
MSGPACK_ADD_ENUM(muster::test::Colour);

namespace muster::test {
namespace {

class Objects : public CommContract {};
MUSTER_COMM_CONTRACT(Objects);

// A different object for each rank and time.
Everything everything(int rank, int time = 0) {
  Everything object;
  object.number = -(int64_t{1} << 40) + rank;
  object.real = 0.1 * rank + time;
  object.flag = rank % 2 == 1;
  object.colour = rank % 2 == 1 ? Colour::kGreen : Colour::kRed;
  object.text = std::string(static_cast<size_t>(rank), 'x') + std::string("\0é", 3);
  object.words = std::vector<std::string>(static_cast<size_t>(rank), "word");
  object.table = {{"", {}}, {"loss", {1.5, rank + 0.25}}};
  object.there = rank;
  object.triple = {rank, "three", true};
  object.layers = {{"first", at::full({2, 3}, rank + time)}, {"second", at::arange(rank, at::kLong)}};
  return object;
}

void expect_equal(const Everything& actual, const Everything& wanted) {
  EXPECT_EQ(actual.number, wanted.number);
  EXPECT_EQ(actual.real, wanted.real);
  EXPECT_EQ(actual.flag, wanted.flag);
  EXPECT_EQ(actual.colour, wanted.colour);
  EXPECT_EQ(actual.text, wanted.text);
  EXPECT_EQ(actual.words, wanted.words);
  EXPECT_EQ(actual.table, wanted.table);
  EXPECT_EQ(actual.there, wanted.there);
  EXPECT_EQ(actual.missing, wanted.missing);
  EXPECT_EQ(actual.triple, wanted.triple);
  ASSERT_EQ(actual.layers.size(), wanted.layers.size());
  for (size_t i = 0; i < wanted.layers.size(); ++i) {
    EXPECT_EQ(actual.layers[i].name, wanted.layers[i].name);
    EXPECT_EQ(actual.layers[i].weight.scalar_type(), wanted.layers[i].weight.scalar_type());
    EXPECT_TRUE(at::equal(actual.layers[i].weight, wanted.layers[i].weight));
  }
  EXPECT_FALSE(actual.none.defined());
}

TEST_P(Objects, ByEveryCollectiveFromAndToEveryRank) {
  for (const int n : {1, 2, 4})
    run(n, [](World& world) {
      const int size = world.world_size(), me = world.rank();
      for (int root = 0; root < size; ++root) {
        SCOPED_TRACE(testing::Message() << "root " << root << " of " << size);
        expect_equal(broadcast_object(everything(me, root), root), everything(root, root));

        const auto gathered = gather_object(everything(me, root), root);
        ASSERT_EQ(gathered.size(), me == root ? static_cast<size_t>(size) : 0u);
        for (size_t r = 0; r < gathered.size(); ++r) expect_equal(gathered[r], everything(static_cast<int>(r), root));

        std::vector<Everything> parts;
        for (int r = 0; me == root && r < size; ++r) parts.push_back(everything(r, root));
        expect_equal(scatter_object(parts, root), everything(me, root));
      }
      const auto all = all_gather_object(everything(me));
      ASSERT_EQ(all.size(), static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) expect_equal(all[static_cast<size_t>(r)], everything(r));
    });
}

TEST_P(Objects, AsMessages) {
  run(3, [](World& world) {
    const int me = world.rank();
    if (me != 0) {
      send_object(everything(me), 0, {.tag = 5});
      send_object(text("from ", me), 0);
      expect_equal(recv_object<Everything>(0), everything(0, me));
      return;
    }
    for (const int r : {2, 1}) EXPECT_EQ(recv_object<std::string>(r), text("from ", r));
    int sum = 0, source = -1;
    for (int i = 1; i <= 2; ++i) {
      const auto object = recv_object<Everything>(kAnySource, {.tag = 5}, &source);
      expect_equal(object, everything(source));
      sum += source;
    }
    EXPECT_EQ(sum, 3);
    for (const int r : {1, 2}) send_object(everything(0, r), r);
    send_object(std::string("to myself"), 0);
    EXPECT_EQ(recv_object<std::string>(0, {}, &source), "to myself");
    EXPECT_EQ(source, 0);
  });
}

TEST_P(Objects, EmptyOnes) {
  run(2, [](World& world) {
    const int me = world.rank();
    EXPECT_EQ(broadcast_object(std::string(me == 0 ? "" : "not looked at")), "");
    EXPECT_TRUE((broadcast_object(std::vector<int>(), 1).empty()));
    const std::map<std::string, int> none_here, one{{"mine", 1}};
    EXPECT_EQ(broadcast_object(me == 1 ? none_here : one, 1), none_here);
    EXPECT_EQ(all_gather_object(std::optional<int>()), (std::vector<std::optional<int>>{{}, {}}));
    EXPECT_EQ(gather_object(std::string()).size(), me == 0 ? 2u : 0u);
    EXPECT_EQ(scatter_object(std::vector<std::string>(me == 0 ? 2 : 0)), "");
    EXPECT_FALSE(broadcast_object(at::Tensor()).defined());
    const at::Tensor none = broadcast_object(at::empty({0, 3}, at::kHalf));
    EXPECT_EQ(none.sizes(), (at::IntArrayRef{0, 3}));
    EXPECT_EQ(none.scalar_type(), at::kHalf);
    if (me == 0)
      send_object(std::string(), 1);
    else
      EXPECT_EQ(recv_object<std::string>(0), "");
  });
}

TEST_P(Objects, LargeOnesOfUnequalSizes) {
  run(3, [](World& world) {
    constexpr size_t kLarge = 5'000'000;
    const int me = world.rank();
    const auto of = [](int rank) {
      std::string text(rank == 1 ? 3 : kLarge + static_cast<size_t>(rank), static_cast<char>('a' + rank));
      text.back() = '!';
      return text;
    };
    EXPECT_TRUE(broadcast_object(of(me), 2) == of(2));
    const auto all = all_gather_object(of(me));
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(all.at(static_cast<size_t>(r)) == of(r)) << r;
    const auto gathered = gather_object(of(me), 1);
    for (int r = 0; r < (me == 1 ? 3 : 0); ++r) EXPECT_TRUE(gathered.at(static_cast<size_t>(r)) == of(r)) << r;
    EXPECT_TRUE(scatter_object(me == 2 ? std::vector{of(0), of(1), of(2)} : std::vector<std::string>(), 2) == of(me));
    if (me == 0) send_object(of(0), 2);
    if (me == 2) {
      EXPECT_TRUE(recv_object<std::string>(0) == of(0));
    }
  });
}

TEST_P(Objects, Tensors) {
  run(2, [](World& world) {
    const at::Tensor matrix = at::arange(12, at::kDouble).view({3, 4});
    std::vector<at::Tensor> sent = {
        matrix,
        matrix.t(),                           // strides
        matrix.slice(1, 0, 4, 2),             // a view with gaps
        at::ones({1}, at::kInt).expand({5}),  // one element five times
        at::full({}, 2.5, at::kBFloat16),     // no dimension
        at::full({2, 2}, c10::complex<float>(1, -2), at::kComplexFloat).conj(),
        at::ones({3}).requires_grad_(),
        at::ones({4}, at::kBool),
        at::ones({4}).to(at::kFloat8_e4m3fn),
        world.heap().zeros({1000}).fill_(7),
    };
    const at::Tensor large = at::arange(1'250'000, at::kFloat);
    sent.push_back(large);
    for (const auto& tensors : all_gather_object(sent)) {
      ASSERT_EQ(tensors.size(), sent.size());
      for (size_t i = 0; i < sent.size(); ++i) {
        SCOPED_TRACE(testing::Message() << "tensor " << i);
        EXPECT_EQ(tensors[i].scalar_type(), sent[i].scalar_type());
        EXPECT_TRUE(tensors[i].is_contiguous());
        EXPECT_FALSE(tensors[i].requires_grad());
        EXPECT_FALSE(tensors[i].is_conj());
        EXPECT_EQ(tensors[i].sizes(), sent[i].sizes());
        EXPECT_TRUE(at::equal(tensors[i].to(at::kComplexDouble), sent[i].detach().to(at::kComplexDouble)));
        EXPECT_FALSE(tensors[i].is_alias_of(sent[i]));
      }
    }
    const auto dictionary = broadcast_object(std::map<std::string, at::Tensor>{{"weight", matrix + world.rank()}}, 1);
    EXPECT_TRUE(at::equal(dictionary.at("weight"), matrix + 1));
    for (const auto& [said, tensor] :
         std::map<std::string, at::Tensor>{{"sparse", matrix.to_sparse()}, {"meta", at::empty({3}, at::kMeta)}})
      EXPECT_CONTAINS(message_of<InvalidArgument>([&] { broadcast_object(tensor, world.rank()); }), said);
    barrier();  // nothing was sent
  });
}

TEST_P(Objects, InSubgroups) {
  run(4, [](World& world) {
    const int me = world.rank();
    const Group even = world.new_group({2, 0}), odd = world.new_group({1, 3});
    const Group& mine = me % 2 == 0 ? even : odd;
    const CollectiveOptions options{.group = mine};
    const std::string name = text("rank ", me);
    EXPECT_EQ(broadcast_object(name, 0, options), me % 2 == 0 ? "rank 2" : "rank 1");
    EXPECT_EQ(all_gather_object(name, options), (me % 2 == 0 ? std::vector<std::string>{"rank 2", "rank 0"}
                                                             : std::vector<std::string>{"rank 1", "rank 3"}));
    EXPECT_EQ(gather_object(name, 1, options).size(), mine.rank() == 1 ? 2u : 0u);
    EXPECT_EQ(scatter_object(mine.rank() == 1 ? std::vector<int>{10, 11} : std::vector<int>(), 1, options),
              10 + mine.rank());
    if (mine.rank() == 0)
      send_object(me, 1, {.group = mine});
    else
      EXPECT_EQ(recv_object<int>(0, {.group = mine}), mine.global_rank(0));
    EXPECT_THROW(broadcast_object(1, 0, {.group = me % 2 == 0 ? odd : even}), InvalidArgument);
  });
}

// --- what goes wrong ---

TEST_P(Objects, AnotherTypeIsCorruptAndNamesBoth) {
  run(2, [](World& world) {
    const int me = world.rank();
    const auto expect_corrupt = [](const std::string& said, auto call, const char* sent, const char* wanted) {
      EXPECT_CONTAINS(said, text("rank ", call));
      EXPECT_CONTAINS(said, text("sent a ", sent));
      EXPECT_CONTAINS(said, text("read as ", wanted));
    };
    if (me == 0) {
      broadcast_object(std::string("seven"));
      broadcast_object(std::vector<double>{1.5});
      broadcast_object(std::vector<std::string>{"1"});
      broadcast_object(at::ones({3}));
      broadcast_object(std::tuple<int, std::vector<int>, std::string>(99, {3}, "xxxx"));
      send_object(everything(0), 1);
    } else {
      const auto received = [](auto wanted) { return message_of<CorruptError>([&] { broadcast_object(wanted); }); };
      expect_corrupt(received(7), 0, "std::string", "int");
      expect_corrupt(received(std::vector<int>()), 0, "std::vector<double", "std::vector<int");
      expect_corrupt(received(at::Tensor()), 0, "std::vector<std::string", "at::Tensor");
      expect_corrupt(received(std::string()), 0, "at::Tensor", "std::string");
      expect_corrupt(received(at::Tensor()), 0, "std::tuple<int", "at::Tensor");
      expect_corrupt(message_of<CorruptError>([] { recv_object<std::map<std::string, int>>(0); }), 0,
                     "muster::test::Everything", "std::map<std::string, int");
    }
    EXPECT_EQ(all_gather_object(me), (std::vector<int>{0, 1}));  // the group still works
    // The ranks name different types.
    if (me == 0)
      EXPECT_CONTAINS(message_of<CorruptError>([] { all_gather_object(5); }), "rank 1 sent a std::string");
    else
      EXPECT_CONTAINS(message_of<CorruptError>([] { all_gather_object(std::string("five")); }), "rank 0 sent a int");
    barrier();
  });
}

TEST_P(Objects, BytesThatAreNoObjectAreCorrupt) {
  // send_object sends a size and bytes, so a test can send wrong ones.
  const auto bytes_of = [](std::string_view text) {
    const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
    std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
    return bytes;
  };
  using namespace std::string_view_literals;
  const std::vector<std::string_view> wrong = {
      "\1\0\0\0"sv,                         // a name of one byte that is not there
      "\xff\xff\xff\xffxx"sv,               // a name of four billion bytes
      "\1\0\0\0T"sv,                        // no object
      "\1\0\0\0T\x90\x01"sv,                // two objects
      "\1\0\0\0T\xdd\xff\xff\xff\xff\1"sv,  // a list of four billion numbers
      "\1\0\0\0T\xdb\xff\xff\xff\xff"
      "a"sv,                  // a string of as many letters
      "\1\0\0\0T\x92\x01"sv,  // a list that is cut off
      "\1\0\0\0T\xc1"sv,      // a byte that msgpack never uses
  };
  // Tensors whose parts do not fit: no sizes, an unknown dtype, a negative size, sizes that overflow, too few bytes, an
  // element that is not a byte string.
  const std::vector<std::string_view> tensors = {
      "\1\0\0\0T\x91\x06"sv,
      "\1\0\0\0T\x92\x7f\x90"sv,
      "\1\0\0\0T\x92\x06\x91\xff"sv,
      "\1\0\0\0T\x92\x06\x92\xcf\x80\0\0\0\0\0\0\0\x02"sv,
      "\1\0\0\0T\x92\x06\x92\xcf\x40\0\0\0\0\0\0\0\x04"sv,
      "\1\0\0\0T\x93\x06\x91\x02\xc4\x04"
      "abcd"sv,
      "\1\0\0\0T\x93\x06\x91\x01\x07"sv,
      "\1\0\0\0T\x92\xff\x90"sv,
  };
  run(2, [&](World& world) {
    for (const auto* list : {&wrong, &tensors})
      for (const auto& text : *list) {
        const at::Tensor bytes = bytes_of(text);
        if (world.rank() == 0) {
          send(at::full({1}, bytes.numel(), at::kLong), 1);
          send(bytes, 1);
        } else if (list == &wrong) {
          EXPECT_THROW(recv_object<std::vector<int>>(0), CorruptError) << (&text - wrong.data());
        } else {
          EXPECT_THROW(recv_object<at::Tensor>(0), CorruptError) << (&text - tensors.data());
        }
      }
    if (world.rank() == 0)
      send(at::full({1}, -5, at::kLong), 1);
    else
      EXPECT_CONTAINS(message_of<CorruptError>([] { recv_object<int>(0); }), "an object of -5 bytes");
    barrier();
  });
}

TEST_P(Objects, WithoutMemoryForItTheGroupEnds) {
  if (kSanitized) GTEST_SKIP() << "the sanitizers' allocators end the process";
  run(2, [](World& world) {
    if (world.rank() == 0) {
      send(at::full({1}, int64_t{1} << 55, at::kLong), 1);
      EXPECT_CONTAINS(message_of<Unavailable>([] { barrier(); }), "no memory for an object of 36028797018963968 bytes");
    } else {
      EXPECT_CONTAINS(message_of<Unavailable>([] { recv_object<int>(0); }), "36028797018963968 bytes from rank 0");
    }
  });
}

TEST_P(Objects, MistakesAreInvalidArgumentBeforeAnythingIsSent) {
  run(2, [](World& world) {
    const int me = world.rank();
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { broadcast_object(1, 2); }),
                    "root: expected a rank from 0 to 1, got 2");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { gather_object(1, -1); }),
                    "root: expected a rank from 0 to 1, got -1");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { scatter_object<int>({}, 9); }),
                    "root: expected a rank from 0 to 1, got 9");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { send_object(1, 2); }), "rank: expected a rank from 0 to 1, got 2");
    EXPECT_CONTAINS(message_of<InvalidArgument>([] { recv_object<int>(-3); }),
                    "rank: expected a rank from 0 to 1, got -3");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] {
                      scatter_object(std::vector{1, 2, 3}, me);
                    }),
                    "objects: expected one for each rank of a group of 2, got 3");
    EXPECT_CONTAINS(message_of<InvalidArgument>([&] {
                      scatter_object(std::vector{1, 2}, 1 - me);
                    }),
                    "which is not the source");
    barrier();
    EXPECT_EQ(world.group().stats().operations, 1u);
  });
}

TEST_P(Objects, DisagreementIsMismatchThatNamesTheCalls) {
  run(2, [](World& world) {
    const auto said = message_of<Mismatch>([&] {
      if (world.rank() == 0)
        broadcast_object(1);
      else
        all_gather_object(1);
    });
    EXPECT_CONTAINS(said, "comm_objects_test.cpp:");
    EXPECT_CONTAINS(said, "rank 0 called broadcast of 1 x Long");
    EXPECT_CONTAINS(said, "rank 1 called all_gather of 1 x Long");
  });
}

}  // namespace
}  // namespace muster::test
