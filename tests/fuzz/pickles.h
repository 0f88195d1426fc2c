// Parts of pickles, as Python writes them with protocol 2, and for pickles that Python would not write.
#pragma once

#include <string>
#include <string_view>

namespace muster::test {

inline std::string pickled_string(std::string_view words) {
  const auto size = static_cast<uint32_t>(words.size());
  return std::string("X").append(reinterpret_cast<const char*>(&size), sizeof size).append(words);
}
inline std::string pickled_number(int64_t number) {
  return std::string("\x8a\x08").append(reinterpret_cast<const char*>(&number), sizeof number);
}

struct PickledTensor {
  std::string kind = "torch\nFloatStorage";
  std::string key = "0";
  int64_t elements = 16;  // of the storage
  std::string shape = "K\x02K\x03\x86", strides = "K\x03K\x01\x86";
  std::string more = "";  // arguments
  std::string function = "_rebuild_tensor_v2";
  std::string id = "storage";

  std::string str() const {
    return "ctorch._utils\n" + function + "\n((" + pickled_string(id) + "c" + kind + "\n" + pickled_string(key) +
           pickled_string("cpu") + pickled_number(elements) + "tQ" + std::string("K\0", 2) + shape + strides +
           "\x89"
           "ccollections\nOrderedDict\n)R" +
           more + "tR";
  }
};

}  // namespace muster::test
