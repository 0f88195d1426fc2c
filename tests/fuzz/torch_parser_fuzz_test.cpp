#include "fuzz/parser_fuzz.h"

namespace muster::test {

INSTANTIATE_TEST_SUITE_P(Torch, ParserFuzz, testing::ValuesIn(torch_parsers()), name_of_parser);

}  // namespace muster::test
