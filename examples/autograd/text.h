// A text as numbers, for a language model that reads words.
//
// A word is a run of letters, digits and apostrophes, in lower case. Every other mark is a word by itself. Bytes above
// 127 are letters, so that UTF-8 stays intact. Words are numbered in the order of their first occurrence.
//
// Thread-safety: functions of their arguments.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/tensor.h>
#include <muster/base/error.h>

#include <cctype>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string>
#include <unordered_map>
#include <vector>

struct Text {
  std::string path;
  at::Tensor words;        // int64: the number of each word
  int64_t vocabulary = 0;  // different words
};

// The path of a text that every Debian has (package base-files). Throws Unavailable if this machine has none.
inline std::string text_of_this_machine() {
  const std::initializer_list<const char*> licences{"/usr/share/common-licenses/GPL-3",
                                                    "/usr/share/common-licenses/Apache-2.0"};
  std::string all;
  for (const char* path : licences) {
    if (std::filesystem::exists(path)) return path;
    all += all.empty() ? path : std::string(" nor ") + path;
  }
  throw muster::Unavailable("there is no text to learn: neither " + all, "Give one with --text FILE");
}

// Throws InvalidArgument, with the path and the system's reason, if the file cannot be read.
inline Text read_text(const std::string& path) {
  const auto unreadable = [&](const char* why) {
    return muster::InvalidArgument("cannot read the text " + path + ": " + why, "Give another one with --text FILE");
  };
  if (std::filesystem::is_directory(path)) throw unreadable(std::strerror(EISDIR));
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) throw unreadable(std::strerror(errno));
  const std::string all(std::istreambuf_iterator<char>(file), {});

  std::unordered_map<std::string, int64_t> numbers;
  std::vector<int64_t> words;
  const auto add = [&](const std::string& word) {
    words.push_back(numbers.emplace(word, static_cast<int64_t>(numbers.size())).first->second);
  };
  std::string word;
  for (const char c : all) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '\'' || byte > 127) {
      word += static_cast<char>(std::tolower(byte));
      continue;
    }
    if (!word.empty()) add(word);
    word.clear();
    if (!std::isspace(byte)) add(std::string(1, c));
  }
  if (!word.empty()) add(word);
  return {path, at::tensor(words, at::kLong), static_cast<int64_t>(numbers.size())};
}
