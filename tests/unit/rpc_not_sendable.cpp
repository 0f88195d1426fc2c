// Does not compile, and says why: rpc_not_sendable.cmake.
#include "muster/rpc/call.h"

struct Opaque {
  int file = -1;
};
int use(const Opaque& opaque, std::vector<int> numbers) { return opaque.file; }
void write_to(int a, std::vector<int>& out) { out.push_back(a); }

#if defined(ARGUMENT)
muster::rpc::Payload payload = muster::rpc::pack_for<muster::rpc::arguments_of<&use>>(Opaque(), std::vector<int>());
#elif defined(DECODED)
const auto& function = muster::rpc::function_of<&use>();
#elif defined(OUT_PARAMETER)
const auto& function = muster::rpc::function_of<&write_to>();
#elif defined(OBJECT)
void count_up(int& number) { ++number; }
const auto future = muster::rpc::async<&count_up>("worker");
#elif defined(COUNT)
muster::rpc::Payload payload = muster::rpc::pack_for<muster::rpc::arguments_of<&write_to>>(1, 2, 3);
#else
muster::rpc::Payload payload = muster::rpc::pack(1, std::vector<int>());  // compiles
#endif
