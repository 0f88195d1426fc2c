// What the subcommands of muster have in common.
#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>
#include <vector>

#include "base/text.h"
#include "muster/base/error.h"

namespace muster::tools {

// Parses `words`; false where they ask for help, which is then printed. InvalidArgument, one sentence, where they are
// wrong. `usage`: e.g. "muster run --help".
inline bool parse(CLI::App& app, const std::vector<std::string>& words, const std::string& usage) {
  const std::string advice = "See " + usage;
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // CLI11 takes them last first
    return true;
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ExtrasError&) {
    throw InvalidArgument(text("there is no option ", app.remaining().front()), advice);
  } catch (const CLI::ArgumentMismatch&) {
    throw InvalidArgument(text(words.empty() ? std::string() : words.back(), " needs a value"), advice);
  } catch (const CLI::ParseError& error) {
    throw InvalidArgument(error.what(), advice);
  }
}

int blackbox_command(std::vector<std::string> words);  // blackbox.cpp

}  // namespace muster::tools
