// The secret of a job: 32 bytes that its processes share and nobody else knows. Whoever has it may join the job.
//
// It is never used itself. Each use derives a key of its own from it (HKDF-SHA256, RFC 5869), named by a label, so that
// what is learned of one key says nothing about the others.
//
// A secret is never part of a message or a log: there is no way to print one but hex(). Its bytes are wiped when it
// ends.
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
  // space around it does not count. InvalidArgument where it is shorter. Choose text that nobody can guess: guesses can
  // be tried against a recorded handshake.
  static Secret from_text(std::string_view text);

  // From the text in a file. Unauthorized where others than its owner may read or write it, or the owner is neither
  // this user nor root; Unavailable where it cannot be read.
  static Secret from_file(const std::string& path);

  // From MUSTER_SECRET; nullopt where it is not set.
  static std::optional<Secret> from_environment();

  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret();

  // The key for one use. The same label gives the same key in every process of the job.
  Secret derive(std::string_view label) const;

  std::span<const unsigned char, kBytes> bytes() const { return bytes_; }
  std::string hex() const;  // what from_text() takes; for handing it on to a process of the job

  friend bool operator==(const Secret& one, const Secret& other);  // in constant time
  friend std::ostream& operator<<(std::ostream&, const Secret&) = delete;

 private:
  Secret() = default;
  std::array<unsigned char, kBytes> bytes_{};
};

}  // namespace muster
