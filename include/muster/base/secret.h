// The secret of a job: 32 bytes that only its processes know. Any process that has the secret may join the job.
//
// The secret itself is never used as a key. Each use derives its own key from it (HKDF-SHA256, RFC 5869), named by a
// label, so that knowledge of one key gives no information about the others.
//
// A secret is never part of a message or a log: only hex() can print it. The destructor wipes its bytes.
//
// Thread-safety: a value.
#pragma once

#include <array>
#include <cstddef>
#include <iosfwd>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace muster {

class Secret {
 public:
  static constexpr size_t kBytes = 32;
  static constexpr size_t kShortestText = 16;

  // A new one, from the kernel's random bytes.
  static Secret generate();

  // From text: 64 hexadecimal digits are the bytes themselves; any other text of at least 16 bytes is hashed. White
  // space around it does not count. InvalidArgument if it is shorter. Choose text that cannot be guessed: an attacker
  // can try guesses against a recorded handshake.
  static Secret from_text(std::string_view text);

  // From the text in a file. Unauthorized if users other than its owner may read or write it, or the owner is neither
  // this user nor root; Unavailable if it cannot be read.
  static Secret from_file(const std::string& path);

  // From MUSTER_SECRET; nullopt if it is not set.
  static std::optional<Secret> from_environment();

  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret();

  // The key for one use. The same label gives the same key in every process of the job.
  Secret derive(std::string_view label) const;

  std::span<const unsigned char, kBytes> bytes() const { return bytes_; }
  std::string hex() const;  // the form that from_text() takes; to pass the secret to another process of the job

  friend bool operator==(const Secret& one, const Secret& other);  // in constant time
  friend std::ostream& operator<<(std::ostream&, const Secret&) = delete;

 private:
  Secret() = default;
  std::array<unsigned char, kBytes> bytes_{};
};

}  // namespace muster
