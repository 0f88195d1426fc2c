// What remote calls read of a message, under libFuzzer: values (msgpack), the table of tensors, errors. Built with
// clang only; the unit tests of each check more about fewer inputs.
//
// The input: which types, how many pieces, their lengths; the rest is the bytes.
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "base/byte_stream.h"
#include "muster/base/error.h"
#include "muster/rpc/serialize.h"
#include "rpc/values/error_reply.h"
#include "rpc/values/tensor_table.h"

namespace {

namespace rpc = muster::rpc;

template <typename... T>
void read(std::string_view body, std::vector<at::Tensor>& tensors) {
  rpc::PayloadReader reader{body, tensors};
  rpc::unpack<T...>(reader);
}

struct Tree {
  int value = 0;
  std::vector<Tree> below;
  MSGPACK_DEFINE(value, below)
};

void read_values(uint8_t types, std::string_view body, std::vector<at::Tensor>& tensors) {
  switch (types % 8) {
    case 0:
      return read<at::Tensor, std::string, std::vector<std::pair<std::string, double>>>(body, tensors);
    case 1:
      return read<std::map<std::string, std::vector<int64_t>>, std::optional<uint8_t>>(body, tensors);
    case 2:
      return read<std::variant<int, std::string, at::Tensor>, std::array<float, 3>>(body, tensors);
    case 3:
      return read<std::shared_ptr<std::string>, std::unique_ptr<int>, bool, char>(body, tensors);
    case 4:
      return read<Tree>(body, tensors);
    case 5:
      return read<std::set<int16_t>, std::tuple<uint32_t, double, std::string>>(body, tensors);
    case 6:
      return read<std::vector<at::Tensor>, std::vector<bool>>(body, tensors);
    default:
      return read<>(body, tensors);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 8) return 0;
  const std::string bytes(reinterpret_cast<const char*>(data), size);
  const uint8_t what = data[0];
  std::string_view rest = std::string_view(bytes).substr(8);
  try {
    if (what & 0x80) {
      rpc::detail::decode_error(rest);
      return 0;
    }
    std::vector<std::string> blocks;
    for (int i = 1; i <= data[1] % 4; ++i) blocks.emplace_back(data[1 + i] * (i == 1 ? 16 : 1), static_cast<char>(i));
    std::vector<muster::transport::Piece> pieces;
    for (std::string& block : blocks)
      pieces.push_back({reinterpret_cast<std::byte*>(block.data()), block.size(), nullptr, false});
    const std::string_view table = rest.substr(0, std::min<size_t>(rest.size(), data[5]));
    rest.remove_prefix(table.size());
    std::vector<at::Tensor> tensors;
    if (!table.empty()) {
      muster::WireReader reader(table);
      tensors = rpc::detail::read_tensors(reader, pieces);
      for (const at::Tensor& tensor : tensors)  // each ends within its bytes
        if (tensor.defined() && tensor.numel() != 0 &&
            tensor.storage_offset() * tensor.itemsize() + tensor.nbytes() > tensor.storage().nbytes())
          std::abort();
    }
    read_values(what, rest, tensors);
  } catch (const muster::CorruptError&) {
    // As it should be.
  } catch (const muster::InvalidArgument&) {
    // Of other types than these.
  }
  return 0;
}
