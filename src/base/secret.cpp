#include "muster/base/secret.h"

#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/env.h"
#include "base/fd.h"
#include "base/random.h"
#include "base/text.h"
#include "muster/base/error.h"

namespace muster {
namespace {

constexpr size_t kLongestFile = 65'536;

// HKDF: extract with Muster's own salt, expand with the label.
void hkdf(std::span<const unsigned char> key, std::string_view label, std::span<unsigned char> out) {
  static constexpr std::string_view kSalt = "muster";
  const std::unique_ptr<EVP_KDF, decltype(&EVP_KDF_free)> kdf(::EVP_KDF_fetch(nullptr, "HKDF", nullptr), EVP_KDF_free);
  const std::unique_ptr<EVP_KDF_CTX, decltype(&EVP_KDF_CTX_free)> context(::EVP_KDF_CTX_new(kdf.get()),
                                                                          EVP_KDF_CTX_free);
  const auto octets = [](const char* name, const void* data, size_t size) {
    return ::OSSL_PARAM_construct_octet_string(name, const_cast<void*>(data), size);
  };
  char digest[] = "SHA256";
  const OSSL_PARAM parameters[] = {
      ::OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
      octets(OSSL_KDF_PARAM_KEY, key.data(), key.size()), octets(OSSL_KDF_PARAM_SALT, kSalt.data(), kSalt.size()),
      octets(OSSL_KDF_PARAM_INFO, label.data(), label.size()), ::OSSL_PARAM_construct_end()};
  if (context && ::EVP_KDF_derive(context.get(), out.data(), out.size(), parameters) == 1) return;
  ::ERR_clear_error();
  throw Unavailable("OpenSSL cannot derive keys here (HKDF with SHA-256)", "Check its configuration, openssl.cnf");
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

std::string_view trimmed(std::string_view text) {
  static constexpr std::string_view kSpace = " \t\r\n";
  const size_t from = text.find_first_not_of(kSpace);
  return from == std::string_view::npos ? std::string_view()
                                        : text.substr(from, text.find_last_not_of(kSpace) + 1 - from);
}

// A string that is wiped when it is destroyed.
struct WipedString {
  ~WipedString() { ::OPENSSL_cleanse(text.data(), text.size()); }
  std::string text;
};

void check_private(const std::string& path, const struct stat& status) {
  if (!S_ISREG(status.st_mode))
    throw InvalidArgument(text(path, " is not an ordinary file, so no secret can be read from it"), "Name a file");
  if (status.st_uid != ::geteuid() && status.st_uid != 0)
    throw Unauthorized(
        text("the secret in ", path, " belongs to user ", status.st_uid, ", and this is user ", ::geteuid()),
        text("Use a file that you own; 'muster secret FILE' makes one"));
  if ((status.st_mode & 077) != 0)
    throw Unauthorized(text("the secret in ", path, " can be read or written by other users"),
                       text("Run 'chmod 600 ", path, "', and make a new secret if others may have seen it"));
}

}  // namespace

Secret::~Secret() { ::OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Secret Secret::generate() {
  Secret secret;
  random_bytes(secret.bytes_);
  return secret;
}

Secret Secret::from_text(std::string_view text) {
  text = trimmed(text);
  Secret secret;
  if (text.size() == 2 * kBytes && std::all_of(text.begin(), text.end(), [](char c) { return hex_digit(c) >= 0; })) {
    for (size_t i = 0; i < kBytes; ++i)
      secret.bytes_[i] = static_cast<unsigned char>(hex_digit(text[2 * i]) << 4 | hex_digit(text[2 * i + 1]));
    return secret;
  }
  if (text.size() < kShortestText)
    throw InvalidArgument(
        muster::text("a secret of ", text.size(), " bytes is too short: it could be guessed"),
        muster::text("Use what 'muster secret' prints, or at least ", kShortestText, " random bytes"));
  hkdf({reinterpret_cast<const unsigned char*>(text.data()), text.size()}, "secret of text", secret.bytes_);
  return secret;
}

Secret Secret::from_file(const std::string& path) {
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // a FIFO must not block
  if (!file) throw_errno(text("cannot read the secret in ", path), "'muster secret FILE' makes one");
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_errno(text("fstat of ", path));
  check_private(path, status);
  WipedString read;
  read.text.resize(kLongestFile + 1);
  size_t size = 0;
  while (size < read.text.size()) {
    const ssize_t n = ::read(file.get(), read.text.data() + size, read.text.size() - size);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno(text("cannot read the secret in ", path));
    if (n == 0) break;
    size += static_cast<size_t>(n);
  }
  if (size > kLongestFile)
    throw InvalidArgument(text(path, " is longer than ", kLongestFile, " bytes, so it is not a secret"),
                          "Name a file that 'muster secret FILE' made");
  try {
    return from_text(std::string_view(read.text).substr(0, size));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(text(path, ": ", error.message()), error.advice());
  }
}

std::optional<Secret> Secret::from_environment() {
  WipedString value;
  if (auto set = env_string("MUSTER_SECRET")) {
    value.text = *std::move(set);
  } else {
    return std::nullopt;
  }
  try {
    return from_text(value.text);
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(text("the environment variable MUSTER_SECRET: ", error.message()), error.advice());
  }
}

Secret Secret::derive(std::string_view label) const {
  Secret derived;
  hkdf(bytes_, label, derived.bytes_);
  return derived;
}

std::string Secret::hex() const { return to_hex(bytes_); }

bool operator==(const Secret& one, const Secret& other) {
  return ::CRYPTO_memcmp(one.bytes_.data(), other.bytes_.data(), Secret::kBytes) == 0;
}

}  // namespace muster
