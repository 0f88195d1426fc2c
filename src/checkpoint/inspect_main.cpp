// muster-checkpoint: the part of `muster checkpoint` that needs libtorch. The muster command checks the arguments, and passes on
//
//   muster-checkpoint ls PATH | verify PATH... | diff TOLERANCE A B | convert PREFIX OVERWRITES TARGET SOURCE...
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "checkpoint/inspect.h"
#include "launch/text_table.h"
#include "muster/base/error.h"

namespace {

muster::checkpoint::Inspection inspect(std::vector<std::string> words) {
  namespace checkpoint = muster::checkpoint;
  const std::string command = words.empty() ? "" : words.front();
  if (!words.empty()) words.erase(words.begin());
  if (command == "ls" && words.size() == 1) return checkpoint::list(words[0]);
  if (command == "verify" && !words.empty()) return checkpoint::verify(words);
  if (command == "diff" && words.size() == 3)
    return checkpoint::diff(words[1], words[2], std::strtod(words[0].c_str(), nullptr));
  if (command == "convert" && words.size() >= 4)
    return checkpoint::convert({words.begin() + 3, words.end()}, words[2],
                               {.prefix = words[0], .overwrites = words[1] == "1"});
  throw muster::InvalidArgument("muster-checkpoint is called by muster checkpoint", "See muster checkpoint --help");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto result = inspect({argv + 1, argv + argc});
    std::cout << result.words << std::flush;
    return result.good ? 0 : 1;
  } catch (const muster::InvalidArgument& error) {
    std::cerr << "muster: " << muster::launch::printable(error.what()) << std::endl;
    return 2;
  } catch (const muster::Error& error) {
    std::cerr << "muster: " << muster::launch::printable(error.what()) << std::endl;
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "muster: " << muster::checkpoint::words_for_error(error) << std::endl;
    return 1;
  }
}
