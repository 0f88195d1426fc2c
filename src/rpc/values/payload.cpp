// The parts of serialize.h that do not depend on types: reading msgpack within bounds.
#include <algorithm>
#include <bit>
#include <cstring>

#include "base/text.h"
#include "muster/base/error.h"
#include "muster/rpc/function.h"
#include "muster/rpc/serialize.h"

namespace muster::rpc::detail {
namespace {

constexpr int kDeepest = 128;

[[noreturn]] void corrupt(std::string_view why) { throw CorruptError(text("the values of a message: ", why)); }

}  // namespace

BodyReader::BodyReader(std::string_view body) : body_(body) {}

const char* BodyReader::take(size_t bytes) {
  if (bytes > body_.size() - at_) corrupt("they end early");
  const char* const taken = body_.data() + at_;
  at_ += bytes;
  return taken;
}

// msgpack's numbers are big-endian.
uint64_t BodyReader::number(size_t bytes) {
  const char* const from = take(bytes);
  uint64_t value = 0;
  for (size_t i = 0; i < bytes; ++i) value = value << 8 | static_cast<unsigned char>(from[i]);
  return value;
}

// Each value takes at least one byte, so the elements that all open containers still claim must not outnumber the bytes
// that are left.
void BodyReader::promise(size_t objects) {
  expected_ += objects;
  if (expected_ > body_.size() - at_) corrupt("a container has more elements than there are bytes");
}

msgpack::object* BodyReader::room(size_t objects) {
  if (objects <= near_.size() - used_) {
    msgpack::object* const taken = near_.data() + used_;
    used_ += objects;
    return taken;
  }
  far_.push_back(std::make_unique<msgpack::object[]>(objects));
  return far_.back().get();
}

msgpack::object BodyReader::next() {
  if (at_ == body_.size()) corrupt("there are too few values");
  expected_ = 1;
  return parse(0);
}

void BodyReader::expect_done() const {
  if (at_ != body_.size()) corrupt("bytes are left over");
}

msgpack::object BodyReader::parse(int depth) {
  if (depth > kDeepest) corrupt("they are nested too deeply");
  const auto head = static_cast<unsigned char>(*take(1));
  --expected_;
  msgpack::object out;
  const auto unsigned_number = [&](uint64_t value) {
    out.type = msgpack::type::POSITIVE_INTEGER;
    out.via.u64 = value;
  };
  const auto signed_number = [&](int64_t value) {
    if (value >= 0) return unsigned_number(static_cast<uint64_t>(value));
    out.type = msgpack::type::NEGATIVE_INTEGER;
    out.via.i64 = value;
  };
  const auto string = [&](size_t size) {
    out.type = msgpack::type::STR;
    out.via.str.size = static_cast<uint32_t>(size);
    out.via.str.ptr = take(size);
  };
  const auto ext = [&](size_t size) {  // one byte with the type comes before the data
    out.type = msgpack::type::EXT;
    out.via.ext.size = static_cast<uint32_t>(size);
    out.via.ext.ptr = take(size + 1);
  };
  const auto array = [&](size_t size) {
    promise(size);
    msgpack::object* const parts = room(size);
    for (size_t i = 0; i < size; ++i) parts[i] = parse(depth + 1);
    out.type = msgpack::type::ARRAY;
    out.via.array.size = static_cast<uint32_t>(size);
    out.via.array.ptr = parts;
  };
  const auto map = [&](size_t size) {
    promise(2 * size);
    // A key and its value are two objects in a row.
    static_assert(sizeof(msgpack::object_kv) == 2 * sizeof(msgpack::object));
    msgpack::object* const parts = room(2 * size);
    for (size_t i = 0; i < 2 * size; ++i) parts[i] = parse(depth + 1);
    out.type = msgpack::type::MAP;
    out.via.map.size = static_cast<uint32_t>(size);
    out.via.map.ptr = reinterpret_cast<msgpack::object_kv*>(parts);
  };

  if (head <= 0x7f) {
    unsigned_number(head);
  } else if (head >= 0xe0) {
    signed_number(static_cast<int8_t>(head));
  } else if (head <= 0x8f) {
    map(head & 0x0f);
  } else if (head <= 0x9f) {
    array(head & 0x0f);
  } else if (head <= 0xbf) {
    string(head & 0x1f);
  } else {
    switch (head) {
      case 0xc0:
        break;  // nil, which `out` is already
      case 0xc2:
      case 0xc3:
        out.type = msgpack::type::BOOLEAN;
        out.via.boolean = head == 0xc3;
        break;
      case 0xc4:
      case 0xc5:
      case 0xc6: {
        const size_t size = number(size_t{1} << (head - 0xc4));
        out.type = msgpack::type::BIN;
        out.via.bin.size = static_cast<uint32_t>(size);
        out.via.bin.ptr = take(size);
        break;
      }
      case 0xc7:
      case 0xc8:
      case 0xc9:
        ext(number(size_t{1} << (head - 0xc7)));
        break;
      case 0xca:
        out.type = msgpack::type::FLOAT32;
        out.via.f64 = std::bit_cast<float>(static_cast<uint32_t>(number(4)));
        break;
      case 0xcb:
        out.type = msgpack::type::FLOAT64;
        out.via.f64 = std::bit_cast<double>(number(8));
        break;
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        unsigned_number(number(size_t{1} << (head - 0xcc)));
        break;
      case 0xd0:
        signed_number(static_cast<int8_t>(number(1)));
        break;
      case 0xd1:
        signed_number(static_cast<int16_t>(number(2)));
        break;
      case 0xd2:
        signed_number(static_cast<int32_t>(number(4)));
        break;
      case 0xd3:
        signed_number(static_cast<int64_t>(number(8)));
        break;
      case 0xd4:
      case 0xd5:
      case 0xd6:
      case 0xd7:
      case 0xd8:
        ext(size_t{1} << (head - 0xd4));
        break;
      case 0xd9:
      case 0xda:
      case 0xdb:
        string(number(size_t{1} << (head - 0xd9)));
        break;
      case 0xdc:
      case 0xdd:
        array(number(head == 0xdc ? 2 : 4));
        break;
      case 0xde:
      case 0xdf:
        map(number(head == 0xde ? 2 : 4));
        break;
      default:
        corrupt("a byte that msgpack does not use");
    }
  }
  return out;
}

namespace {

// The recursion is bounded, because the reader bounds an object's depth.
bool has_tensor(const msgpack::object& value, uint32_t tensor) {
  switch (value.type) {
    case msgpack::type::EXT: {
      uint32_t index = 0;
      if (value.via.ext.type() != muster::detail::kTensorExt || value.via.ext.size != sizeof index) return false;
      std::memcpy(&index, value.via.ext.data(), sizeof index);
      return index == tensor;
    }
    case msgpack::type::ARRAY:
      return std::any_of(value.via.array.ptr, value.via.array.ptr + value.via.array.size,
                         [&](const msgpack::object& part) { return has_tensor(part, tensor); });
    case msgpack::type::MAP:
      return std::any_of(
          value.via.map.ptr, value.via.map.ptr + value.via.map.size,
          [&](const msgpack::object_kv& pair) { return has_tensor(pair.key, tensor) || has_tensor(pair.val, tensor); });
    default:
      return false;
  }
}

}  // namespace

std::optional<size_t> argument_with(std::string_view body, size_t tensor) {
  BodyReader reader(body);
  for (size_t number = 1;; ++number) {
    try {
      if (has_tensor(reader.next(), static_cast<uint32_t>(tensor))) return number;
    } catch (const CorruptError&) {  // no more arguments
      return {};
    }
  }
}

void cannot_send(const std::type_info& type, std::string_view why) {
  throw InvalidArgument(text("a value cannot be sent: ", why, " (", type_name(type), ")"),
                        "All values of a message together may have 1 GiB besides tensors; send large data as tensors");
}

void is_not(const std::type_info& type, std::string_view why) {
  throw CorruptError(
      text("the values of a message are not of type ", type_name(type), ": ", why),
      "The two programs have the function, but another definition of a type in it: build both from one source");
}

}  // namespace muster::rpc::detail
