// Where the build has put what tests run. The definitions are in a file of the build (places.cpp.in), so that the
// objects of all tests are the same wherever the checkout lies, and ccache serves all checkouts with them.
#pragma once

namespace muster::test {

extern const char* const kMusterCommand;   // the program muster
extern const char* const kLaunchProgram;   // what the ranks of launch_tests run
extern const char* const kElasticProgram;  // the same, with training
extern const char* const kWorldProgram;    // a small World, for the tests of launchers
extern const char* const kExamplesFolder;  // with the programs of the tutorial
extern const char* const kFashionMnist;    // the demo
extern const char* const kPython;          // whose torch this libtorch is; "" if it has none
extern const char* const kSourceFolder;    // of the checkout

}  // namespace muster::test
