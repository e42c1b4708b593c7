// What this machine can do, measured (octavo/ceilings.py puts the figures together). Each takes about
// `seconds` and gives the best of many short rounds: a busy neighbour does not count.
#pragma once
#include "isa.h"

namespace octavo {

// Bytes a second that all threads read together. In a round each reads the next `round` bytes of
// its own `share` bytes, over and over: the share chooses the cache, or none. ahead: prefetch.
double probe_read(const Kernels& kernels, int threads, int64_t share, int64_t round,
                  int64_t ahead, double seconds);

// Operations a second of all threads at work together. kind: as in RowTable::peak.
double probe_ops(const Kernels& kernels, int threads, int kind, double seconds);

// Seconds of one barrier at which everybody arrives at once.
double probe_barrier(int threads, double seconds);

}  // namespace octavo
