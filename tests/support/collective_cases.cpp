#include "support/collective_cases.h"

#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>

namespace muster::test {
namespace {

// Parts for different ranks lie far apart in the pattern.
int64_t shift_for(const Case& c, int rank) { return c.shift + int64_t{rank} * 1009; }

// A tensor of the case: element i is table[i + shift].
std::shared_ptr<TestTensor> tensor(const Case& c, const at::Tensor& table, int64_t shift, int64_t count) {
  return std::make_shared<TestTensor>(c.world, c.group.rank(), c.kind, tile(table, shift, count));
}
// One to be written: it holds something else than it shall.
std::shared_ptr<TestTensor> output(const Case& c, int64_t count) {
  return tensor(c, table_of(c.dtype, 100), c.shift + 1, count);
}
const at::Tensor& input_of(const Case& c) { return table_of(c.dtype, c.group.rank()); }

std::vector<std::shared_ptr<TestTensor>> outputs(const Case& c, int n) {
  std::vector<std::shared_ptr<TestTensor>> list;
  for (int r = 0; r < n; ++r) list.push_back(output(c, c.count));
  return list;
}
std::vector<std::shared_ptr<TestTensor>> inputs_for_all(const Case& c) {
  std::vector<std::shared_ptr<TestTensor>> list;
  for (int r = 0; r < c.group.size(); ++r) list.push_back(tensor(c, input_of(c), shift_for(c, r), c.count));
  return list;
}
std::vector<at::Tensor> tensors(const std::vector<std::shared_ptr<TestTensor>>& list) {
  std::vector<at::Tensor> result;
  for (const auto& item : list) result.push_back(**item);
  return result;
}

void expect(const TestTensor& actual, const at::Tensor& table, int64_t shift, const char* what) {
  EXPECT_EQ(difference(actual, table, shift), "") << what;
  EXPECT_TRUE(actual.surroundings_intact()) << what << ": memory beside it was written";
}

// Issues one of the two forms.
template <typename Blocking, typename Async>
Work issue(const Case& c, Blocking blocking, Async async) {
  if (c.async) return async();
  blocking();
  return Work();
}
#define ISSUE(call, ...) \
  issue(                 \
      c, [&] { call(__VA_ARGS__); }, [&] { return call##_async(__VA_ARGS__); })

Finish start_all_reduce(const Case& c) {
  const auto t = tensor(c, input_of(c), c.shift, c.count);
  Work work = ISSUE(all_reduce, *t, {.op = c.op, .group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*t, reduced_table(c.dtype, c.op, c.group.size()), c.shift, "the tensor");
  };
}

Finish start_reduce(const Case& c) {
  const auto t = tensor(c, input_of(c), c.shift, c.count);
  Work work = ISSUE(reduce, *t, c.root, {.op = c.op, .group = c.group});
  return [=]() mutable {
    work.wait();
    if (c.group.rank() == c.root)
      expect(*t, reduced_table(c.dtype, c.op, c.group.size()), c.shift, "the root's tensor");
    else
      expect(*t, input_of(c), c.shift, "another's tensor");
  };
}

Finish start_scan(const Case& c) {
  const auto t = tensor(c, input_of(c), c.shift, c.count);
  Work work = ISSUE(scan, *t, {.op = c.op, .group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*t, reduced_table(c.dtype, c.op, c.group.rank() + 1), c.shift, "the tensor");
  };
}

Finish start_broadcast(const Case& c) {
  const auto t = c.group.rank() == c.root ? tensor(c, input_of(c), c.shift, c.count) : output(c, c.count);
  Work work = ISSUE(broadcast, *t, c.root, {.group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*t, table_of(c.dtype, c.root), c.shift, "the tensor");
  };
}

Finish start_all_gather(const Case& c) {
  const auto in = tensor(c, input_of(c), c.shift, c.count);
  const auto out = outputs(c, c.group.size());
  Work work = ISSUE(all_gather, tensors(out), *in, {.group = c.group});
  return [=]() mutable {
    work.wait();
    for (int r = 0; r < c.group.size(); ++r) expect(*out[r], table_of(c.dtype, r), c.shift, "an output");
    expect(*in, input_of(c), c.shift, "the input");
  };
}

Finish start_all_gather_into_tensor(const Case& c) {
  const auto in = tensor(c, input_of(c), c.shift, c.count);
  const auto out = output(c, c.count * c.group.size());
  Work work = ISSUE(all_gather_into_tensor, *out, *in, {.group = c.group});
  return [=]() mutable {
    work.wait();
    const at::Tensor flat = (*out)->contiguous().view(-1);
    for (int r = 0; r < c.group.size(); ++r)
      EXPECT_EQ(difference(flat.narrow(0, r * c.count, c.count), table_of(c.dtype, r), c.shift), "")
          << "part of rank " << r;
    EXPECT_TRUE(out->surroundings_intact());
    expect(*in, input_of(c), c.shift, "the input");
  };
}

Finish start_reduce_scatter(const Case& c) {
  const auto in = inputs_for_all(c);
  const auto out = output(c, c.count);
  Work work = ISSUE(reduce_scatter, *out, tensors(in), {.op = c.op, .group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*out, reduced_table(c.dtype, c.op, c.group.size()), shift_for(c, c.group.rank()), "the output");
    for (int r = 0; r < c.group.size(); ++r) expect(*in[r], input_of(c), shift_for(c, r), "an input");
  };
}

Finish start_reduce_scatter_tensor(const Case& c) {
  std::vector<at::Tensor> parts;
  for (int r = 0; r < c.group.size(); ++r) parts.push_back(tile(input_of(c), shift_for(c, r), c.count));
  const at::Tensor all = at::cat(parts);
  const auto in = std::make_shared<TestTensor>(c.world, c.group.rank(), c.kind, all);
  const auto out = output(c, c.count);
  Work work = ISSUE(reduce_scatter_tensor, *out, *in, {.op = c.op, .group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*out, reduced_table(c.dtype, c.op, c.group.size()), shift_for(c, c.group.rank()), "the output");
    EXPECT_EQ(difference(*in, all), "") << "the input";
  };
}

Finish start_gather(const Case& c) {
  const auto in = tensor(c, input_of(c), c.shift, c.count);
  const auto out = outputs(c, c.group.rank() == c.root ? c.group.size() : 0);
  Work work = ISSUE(gather, *in, tensors(out), c.root, {.group = c.group});
  return [=]() mutable {
    work.wait();
    for (size_t r = 0; r < out.size(); ++r)
      expect(*out[r], table_of(c.dtype, static_cast<int>(r)), c.shift, "an output");
    expect(*in, input_of(c), c.shift, "the input");
  };
}

Finish start_scatter(const Case& c) {
  const bool root = c.group.rank() == c.root;
  const auto in = root ? inputs_for_all(c) : std::vector<std::shared_ptr<TestTensor>>();
  const auto out = output(c, c.count);
  Work work = ISSUE(scatter, *out, tensors(in), c.root, {.group = c.group});
  return [=]() mutable {
    work.wait();
    expect(*out, table_of(c.dtype, c.root), shift_for(c, c.group.rank()), "the output");
    for (int r = 0; r < static_cast<int>(in.size()); ++r) expect(*in[r], input_of(c), shift_for(c, r), "an input");
  };
}

// Rank r sends rows(r, d) rows of kWidth elements to rank d. Some parts are empty.
Finish start_all_to_all_of(const Case& c, int64_t width, const std::function<int64_t(int, int)>& rows,
                           bool give_splits) {
  const int n = c.group.size(), me = c.group.rank();
  AllToAllOptions options{.group = c.group};
  std::vector<at::Tensor> parts;
  int64_t received = 0;
  std::vector<int64_t> from;
  for (int r = 0; r < n; ++r) {
    parts.push_back(tile(input_of(c), shift_for(c, r), rows(me, r) * width));
    from.push_back(rows(r, me));
    received += from.back();
    if (give_splits) {
      options.input_splits.push_back(rows(me, r));
      options.output_splits.push_back(from.back());
    }
  }
  const at::Tensor sent = at::cat(parts).view({-1, width});
  // Rows are dimension 0 of an ordinary tensor or of a transposed one.
  const auto place = [&](const at::Tensor& flat) {
    if (c.kind == Kind::kHeap) return c.world.heap().empty(flat.sizes(), c.dtype).copy_(flat);
    if (c.kind == Kind::kTransposed) return flat.t().contiguous().t();
    return flat.clone();
  };
  const at::Tensor in = place(sent), out = place(tile(table_of(c.dtype, 100), 0, received * width).view({-1, width}));
  Work work = ISSUE(all_to_all_single, out, in, options);
  return [=]() mutable {
    work.wait();
    const at::Tensor flat = out.contiguous().view(-1);
    int64_t begin = 0;
    for (int r = 0; r < n; begin += from[static_cast<size_t>(r)] * width, ++r)
      EXPECT_EQ(difference(flat.narrow(0, begin, from[static_cast<size_t>(r)] * width), table_of(c.dtype, r),
                           shift_for(c, me)),
                "")
          << "part of rank " << r;
    EXPECT_EQ(difference(in, sent), "") << "the input";
  };
}

Finish start_all_to_all(const Case& c) {
  return start_all_to_all_of(
      c, 1, [&](int, int) { return c.count; }, false);
}
Finish start_all_to_all_with_splits(const Case& c) {
  return start_all_to_all_of(
      c, 3, [&](int from, int to) { return (from + 2 * to) % 4 == 1 ? 0 : c.count / 3 + from + 2 * to; }, true);
}

// Each rank to the next one, all concurrently.
Finish start_send_recv(const Case& c) {
  const int n = c.group.size(), me = c.group.rank();
  const auto out = tensor(c, input_of(c), c.shift, c.count), in = output(c, c.count);
  const MessageOptions options{.tag = static_cast<int>(c.shift % 100), .group = c.group};
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  Work receive = irecv(*in, before, options), sending;
  if (c.async)
    sending = isend(*out, next, options);
  else
    send(*out, next, options);
  return [=]() mutable {
    receive.wait();
    sending.wait();
    expect(*in, table_of(c.dtype, before), c.shift, "what was received");
    expect(*out, input_of(c), c.shift, "what was sent");
  };
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "rank " << c.group.rank() << " of " << c.group.size() << ": " << c.count << " x "
             << c10::toString(c.dtype) << ", " << muster::to_string(c.op) << ", " << to_string(c.kind) << ", root "
             << c.root << (c.async ? ", async" : "") << ", shift " << c.shift;
}

const std::vector<Collective>& collectives() {
  static const std::vector<Collective> table = {
      {"all_reduce", true, false, start_all_reduce},
      {"reduce", true, false, start_reduce},
      {"scan", true, false, start_scan},
      {"broadcast", false, false, start_broadcast},
      {"all_gather", false, false, start_all_gather},
      {"all_gather_into_tensor", false, false, start_all_gather_into_tensor},
      {"reduce_scatter", true, true, start_reduce_scatter},
      {"reduce_scatter_tensor", true, true, start_reduce_scatter_tensor},
      {"gather", false, false, start_gather},
      {"scatter", false, true, start_scatter},
      {"all_to_all_single", false, true, start_all_to_all},
      {"all_to_all_single with splits", false, true, start_all_to_all_with_splits},
      {"send and recv", false, false, start_send_recv},
  };
  return table;
}

const Collective& collective(std::string_view name) {
  for (const auto& entry : collectives())
    if (entry.name == name) return entry;
  throw std::logic_error("no such collective");
}

}  // namespace muster::test
