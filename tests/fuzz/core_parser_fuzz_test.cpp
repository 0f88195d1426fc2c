#include "fuzz/parser_fuzz.h"

namespace muster::test {

INSTANTIATE_TEST_SUITE_P(Core, ParserFuzz, testing::ValuesIn(core_parsers()), name_of_parser);

}  // namespace muster::test
