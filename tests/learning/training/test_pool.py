"""Pools of threads: all there from the start."""

from __future__ import annotations

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
