"""``python -m agent.serving.program MODEL``: answers for one model, in a process of its own.

What a request does to a decoder, to ONNX Runtime or to the memory, it does here;
:mod:`agent.serving.answers` ends this process when an answer takes too long, and starts another. Questions
come as lines on standard input (:mod:`agent.serving.lines`), and answers go to standard output.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from agent.serving.lines import READS_FILES, error_line
from agent.serving.requests import Requests
from dpagent.errors import DpagentError, ExitCode
from dpagent.learning.inference.prediction.exported_model import ExportedModel
from dpagent.learning.subnormals import flush_subnormals


def main(model: Path) -> int:
    """Answer until standard input ends."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # The server ends this process when it has ended its own work.
    # What a library prints is no answer.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    flush_subnormals()  # Which inputs have such numbers, the weights of its model decide.
    try:
        requests = Requests(ExportedModel(model))
    except DpagentError as error:
        _write(answers.fileno(), error_line(str(error)))
        return ExitCode.DATA
    _write(answers.fileno(), requests.answer(b'{"about": true}', reads_files=False))
    for line in sys.stdin.buffer:
        _write(answers.fileno(), requests.answer(line[1:], reads_files=line[:1] == READS_FILES))
    return ExitCode.OK


def _write(descriptor: int, line: bytes) -> None:
    left = memoryview(line + b"\n")
    while left:
        left = left[os.write(descriptor, left) :]


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
