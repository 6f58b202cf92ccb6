"""``python -m agent.serving.program MODEL [--gives-way]``: answers for one model, in a process of its own.

What a request does to a decoder, to ONNX Runtime or to the memory, it does here;
:mod:`agent.serving.answers` ends this process when an answer takes too long, and starts another. Questions
come as lines on standard input (:mod:`agent.serving.lines`), and answers go to standard output.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from agent.priority import behind_all
from agent.serving.lines import GIVES_WAY, READS_FILES, error_line
from dpagent.errors import DpagentError, ExitCode

if TYPE_CHECKING:
    from agent.serving.requests import Requests


def main(model: Path, *, gives_way: bool = False) -> int:
    """Answer until standard input ends.

    Args:
        model: the file.
        gives_way: whether it is read, with the libraries that it needs, behind all other programs.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # The server ends this process when it has ended its own work.
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    try:
        requests = behind_all(lambda: _requests_of(model)) if gives_way else _requests_of(model)
    except DpagentError as error:
        _write(answers.fileno(), error_line(str(error)))
        return ExitCode.DATA
    _flush_subnormals()  # In this thread.
    _write(answers.fileno(), requests.answer(b'{"about": true}', reads_files=False))
    for line in sys.stdin.buffer:
        _write(answers.fileno(), requests.answer(line[1:], reads_files=line[:1] == READS_FILES))
    return ExitCode.OK


def _requests_of(model: Path) -> Requests:
    # With all that takes time to load.
    from agent.serving.requests import Requests
    from dpagent.learning.inference.prediction.exported_model import ExportedModel

    _flush_subnormals()
    return Requests(ExportedModel(model))


def _flush_subnormals() -> None:
    from dpagent.learning.subnormals import flush_subnormals

    flush_subnormals()  # Which inputs have such numbers, the weights of the model decide.


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), gives_way=GIVES_WAY in sys.argv[2:]))
