"""Memory that a server asks for and gives back: settings of glibc's malloc.

Left alone, glibc raises its threshold for mapping memory whenever a mapped block is freed, up to
32 MiB: after the first large body, bodies, their texts and token lists come from the heap, which
keeps what is fragmented. Measured with 240 hostile bodies of up to 8 MiB in three rounds, on
SmolLM2: 307 -> 372, 383, 394 MB left alone, 292 -> 312, 320, 320 MB with the thresholds fixed.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # <malloc.h>
SETTINGS = (
    (M_MMAP_THRESHOLD, 256 * 1024),  # above it memory is mapped, and unmapped when it is freed
    (M_TRIM_THRESHOLD, 1024 * 1024),  # free memory at the heap's end that may stay
    (M_ARENA_MAX, 2),  # heaps, which threads share; 8 a core otherwise
)


def steady() -> bool:
    """Set them, before threads have heaps of their own. False where malloc is not glibc's."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    done = [mallopt(what, value) == 1 for what, value in SETTINGS]
    return all(done)
