#include "transport/tcp/hello.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>

#include "base/byte_stream.h"
#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "store/address/tcp_address.h"

namespace muster::transport {
namespace {

constexpr std::string_view kMagic = "MUSTER\r\n", kEntryMagic = "muster1";

HelloKey parse_key(std::string_view hex) {
  HelloKey key{};
  if (hex.size() != 2 * key.size()) throw CorruptError("an address in the directory has no key");
  for (size_t i = 0; i < key.size(); ++i) {
    const char* at = hex.data() + 2 * i;
    if (std::from_chars(at, at + 2, key[i], 16).ptr != at + 2)
      throw CorruptError("an address in the directory has no key");
  }
  return key;
}

}  // namespace

HelloKey make_hello_key() {
  HelloKey key{};
  random_bytes(key);
  return key;
}

bool same_key(const HelloKey& one, const HelloKey& other) {
  return ::CRYPTO_memcmp(one.data(), other.data(), one.size()) == 0;
}

std::string Entry::text() const {
  return muster::text(kEntryMagic, ' ', to_hex(key), ' ', port, addresses.empty() ? "" : " ", join(addresses, " "));
}

Entry Entry::parse(std::string_view text) {
  PlainInput in{std::string(text)};
  std::string magic, key, host;
  Entry entry;
  in >> magic >> key >> entry.port;
  if (!in || magic != kEntryMagic) throw CorruptError("an entry of the directory is not an address");
  entry.key = parse_key(key);
  while (entry.addresses.size() < kMaxAddresses && in >> host) entry.addresses.push_back(host);
  return entry;
}

std::string Hello::bytes() const {
  WireWriter out;
  for (const char c : kMagic) out.put(static_cast<uint8_t>(c));
  out.put(version).put(answer).put(rank).put(to).put(size).put(pid).put(heartbeat_ms);
  for (const unsigned char c : key) out.put(c);
  return out.take();
}

Hello Hello::parse(std::string_view bytes) {
  if (bytes.size() != kHelloBytes || !bytes.starts_with(kMagic)) throw CorruptError("not the greeting of a worker");
  WireReader in(bytes.substr(kMagic.size()));
  Hello hello;
  hello.version = in.get<uint32_t>();
  hello.answer = in.get<HelloAnswer>();
  hello.rank = in.get<uint32_t>();
  hello.to = in.get<uint32_t>();
  hello.size = in.get<uint32_t>();
  hello.pid = in.get<uint32_t>();
  hello.heartbeat_ms = in.get<uint32_t>();
  for (unsigned char& c : hello.key) c = in.get<unsigned char>();
  return hello;
}

}  // namespace muster::transport
