// The report of a process that dies of a fault: the signal, the place, and the stack of the thread that failed.
//
//   install_crash_report();       // once; under `muster run`, muster::init() does it
//
// At SIGSEGV, SIGBUS, SIGILL, SIGFPE or SIGABRT these lines go to standard error, and then the process dies of the same
// signal, with a core file if it would have had one:
//
//   muster: SIGSEGV (11) at address 0x0, in thread 4711 'train'
//   muster: stack: ./train +0x1234
//   muster: stack: /lib/x86_64-linux-gnu/libc.so.6 +0x2724a
//
// The report has files and offsets instead of names, because finding names takes locks and allocates memory, and the
// thread may have died while it held the locks or damaged the memory. The launcher finds the names afterwards
// (launch/kit/symbols.h). Everything that is called here is async-signal-safe: the unwinder was loaded before, and
// finds objects by _dl_find_object(3), which takes no lock. The handler runs on a separate stack, so that a thread that
// has used up its stack can still report it. Only the installing thread has that stack; other threads report on their
// own stacks, and cannot report an overflow. A process that hangs in the report is killed after five seconds.
//
// A handler that was installed before (by a sanitizer, a debugger's library, the program) stays.
//
// Thread-safety: all of it. Process-global, as signal handlers are.
#pragma once

namespace muster {

inline constexpr const char* kCrashReportVariable = "MUSTER_CRASH_REPORT";  // "0": install nothing

// A second call does nothing. If the report cannot be installed, the program goes on without it.
void install_crash_report();

}  // namespace muster
