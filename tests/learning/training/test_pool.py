"""Pools of threads: all there from the start."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from dpagent.learning.training.pool import started_pool


@pytest.mark.parametrize(("threads", "more"), [(1, 0), (2, 2), (5, 5)])
def test_all_threads_have_begun_before_the_first_work(threads: int, more: int) -> None:
    before = threading.active_count()
    pool = started_pool(threads)
    assert threading.active_count() == before + more
    if pool is not None:
        pool.submit(int).result()
        assert threading.active_count() == before + more
        pool.shutdown()


def test_where_no_thread_can_be_started_none_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, threading.active_count()

    def second_fails(self: threading.Thread) -> None:
        if threading.active_count() > before:
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="start new thread"):
        started_pool(3)
    monkeypatch.undo()
    for thread in threading.enumerate()[before:]:
        thread.join(10)
    assert threading.active_count() == before


_GROWTH = """
import re
from pathlib import Path
from dpagent.learning.models.built_ins import built_in
from dpagent.learning.training.numpy_engine.engine import NumpyEngine
from dpagent.learning.training.pool import multiply_together

def mapped_mib():
    return int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024

engine = NumpyEngine(built_in("digits"), microbatch=4, threads=3, products="stacked")
before = mapped_mib()
for _ in range(10):
    multiply_together(engine._pool, 3)
print(mapped_mib() - before)
"""


def test_an_engine_has_the_memory_of_all_its_threads_from_the_start() -> None:
    """OpenBLAS maps 32 MiB for each product of matrices beyond as many as were ever under way at once."""
    result = subprocess.run(
        [sys.executable, "-c", _GROWTH], capture_output=True, text=True, check=True, timeout=300,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert int(result.stdout) < 32
