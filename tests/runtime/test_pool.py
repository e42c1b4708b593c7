"""The thread pool: barriers hold, forks and exits are clean."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys

import pytest

from octavo.kernels import _cpu


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("pin", [False, True])
def test_no_thread_passes_a_barrier_early(threads, pin):
    violations, _ = _cpu.exercise_pool(threads, pin, 20, 50)
    assert violations == 0


def test_many_short_jobs():
    violations, _ = _cpu.exercise_pool(2, False, 2000, 1)
    assert violations == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize("units", [0, 1, 7, 64, 1001])
@pytest.mark.parametrize("grain", [1, 8])
def test_every_unit_is_taken_once_whoever_comes(threads, units, grain):
    for absent in range(threads):
        pieces = _cpu.exercise_share(threads, units, grain, absent)
        assert all(thread >= absent for thread, _, _ in pieces)
        taken = sorted((begin, end) for _, begin, end in pieces)
        assert [begin for begin, _ in taken] + [units] == [0] + [end for _, end in taken]


def test_pieces_get_smaller_but_not_below_the_grain():
    alone = [end - begin for _, begin, end in _cpu.exercise_share(1, 100, 10)]
    assert alone == [50, 25, 12, 10, 3]


def _child(queue):
    queue.put(_cpu.exercise_pool(2, False, 5, 5)[0])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_threads_of_its_own():
    _cpu.exercise_pool(2, False, 5, 5)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_child, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == 0
    process.join(60)
    assert process.exitcode == 0


def test_the_interpreter_exits_with_a_pool_alive():
    code = "from octavo.kernels import _cpu; _cpu.exercise_pool(3, False, 3, 3); print('done')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=True)
    assert done.stdout.split() == [b"done"]
