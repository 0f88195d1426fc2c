// What the subcommands of muster have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::tools {

// Parses `words`. If they ask for help, prints it and returns false. If they are wrong, throws InvalidArgument. `usage`
// is the command that prints the help, for the error's advice: e.g. "muster run --help".
inline bool parse(CLI::App& app, const std::vector<std::string>& words, const std::string& usage) {
  const std::string advice = "See " + usage;
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them last first
    for (const CLI::Option* const option : app.get_options())
      for (const std::string& value : option->results())
        if (value.starts_with("--") && app.get_option_no_throw(value))
          throw InvalidArgument(text(option->get_name(), " needs a value, and ", value, " is an option"), advice);
    return true;
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ExtrasError&) {
    throw InvalidArgument(text("there is no option ", app.remaining().front()), advice);
  } catch (const CLI::ArgumentMismatch&) {
    for (const CLI::Option* const option : app.get_options())
      if (option->get_items_expected_max() == 1 && option->count() > 1)
        throw InvalidArgument(text(option->get_name(), " is given twice"), advice);
    throw InvalidArgument(text(words.empty() ? std::string() : words.back(), " needs a value"), advice);
  } catch (const CLI::ParseError& error) {
    throw InvalidArgument(error.what(), advice);
  }
}

// A whole number from 0 to `most`.
inline uint64_t parse_number(const std::string& option, const std::string& word, uint64_t most) {
  uint64_t number = 0;
  const char* end = word.data() + word.size();
  const auto [stop, error] = std::from_chars(word.data(), end, number);
  if (error != std::errc() || stop != end || number > most)
    throw InvalidArgument(text(option, ": expected a whole number of at most ", most, ", got '", word, "'"),
                          text("Use for example ", option, " 100"));
  return number;
}

// Of standard output; 0 if it is not a terminal. ps.cpp
int terminal_columns();
int terminal_rows();

int blackbox_command(std::vector<std::string> words);    // blackbox.cpp
int checkpoint_command(std::vector<std::string> words);  // checkpoint.cpp
int secret_command(std::vector<std::string> words);      // secret.cpp
int doctor_command(std::vector<std::string> words);      // doctor.cpp
int ledger_command(std::vector<std::string> words);      // ledger.cpp
int ps_command(std::vector<std::string> words);          // ps.cpp
int top_command(std::vector<std::string> words);         // top.cpp

}  // namespace muster::tools
