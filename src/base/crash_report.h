// The last words of a process that dies of a fault: which signal, where, and the stack of the thread that failed.
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
// Files and offsets, no names: to find names means locks and memory, and the thread may have died holding the one or
// breaking the other. The launcher, which is well, finds them afterwards (launch/symbols.h). All that is called here is
// async-signal-safe: the unwinder was loaded before, and finds objects by _dl_find_object(3), which takes no lock. It
// runs on a stack of its own, so that a thread which has used up its stack can still report it; that stack is the
// installing thread's, the others report on their own, and cannot report an overflow. Whoever hangs in here is killed
// after five seconds.
//
// A handler that somebody else has installed (a sanitizer, a debugger's library, the program) stays.
//
// Thread-safety: all of it. Process-global, as signal handlers are.
#pragma once

namespace muster {

inline constexpr const char* kCrashReportVariable = "MUSTER_CRASH_REPORT";  // "0": install nothing

// Nothing happens the second time, and where it cannot be: a report is no reason to stop.
void install_crash_report();

}  // namespace muster
