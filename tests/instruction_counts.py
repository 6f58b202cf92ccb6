"""How many instructions of the processor a piece of work takes, by Valgrind.

Unlike its time, they are the same on every run, however busy the machine is.

As a program, under Valgrind, it does each piece of work in a process of its own, a fork of one that has done
all of them: each begins with the same memory.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

Pieces = Mapping[str, Callable[[], object]]

_REQUESTS = """
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(void) { CALLGRIND_STOP_INSTRUMENTATION; }
"""
_SETTINGS = {
    "PYTHONHASHSEED": "0", "PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


def why_not() -> str:
    """Why this machine counts none; empty if it does."""
    missing = [name for name in ("valgrind", "cc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


def instructions(module: str, folder: Path) -> dict[str, int]:
    """Those of each piece of work that a module of the tests has in its ``PIECES``.

    Args:
        module: its name.
        folder: for what Valgrind writes.
    """
    requests, source = folder / "requests.so", folder / "requests.c"
    source.write_text(_REQUESTS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", requests, source], check=True)
    path = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/%p.counts",
            f"--log-file={folder}/log", sys.executable, "-P", __file__, module, requests,
        ],
        env=os.environ | _SETTINGS | {"PYTHONPATH": os.pathsep.join(path)},
        check=True, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    counts = {}
    for line in done.stdout.splitlines():
        name, process = line.split("\t")
        written = (folder / f"{process}.counts").read_text().splitlines()
        (counts[name],) = (int(each.split()[1]) for each in written if each.startswith("totals:"))
    return counts


def _count(pieces: Pieces, requests: ctypes.CDLL) -> None:
    for work in pieces.values():
        work()
    gc.collect()
    gc.disable()
    for name, work in pieces.items():
        process = os.fork()
        if not process:
            requests.begin()
            work()
            requests.end()
            os._exit(0)
        os.waitpid(process, 0)
        print(name, process, sep="\t", flush=True)


if __name__ == "__main__":
    _count(import_module(sys.argv[1]).PIECES, ctypes.CDLL(sys.argv[2]))
