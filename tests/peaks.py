"""What reading data takes at its peak, in a process with a limit on its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

READ = """
import json, logging, resource, sys
from pathlib import Path
import PIL.Image, PIL.ImageOps
from dpagent.learning.data.derived import Unfailing
from dpagent.learning.data.opening import open_declared
from dpagent.learning.data.settings import DatasetSettings
from dpagent.errors import DpagentError

logging.disable()

def status(key):
    (line,) = [line for line in open("/proc/self/status") if line.startswith(key)]
    return int(line.split()[1]) / 1024

resource.setrlimit(resource.RLIMIT_AS, (int(status("VmSize") + 1024) << 20,) * 2)
for line in sys.stdin:
    Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
    before, found = status("VmRSS"), {}
    try:
        settings = DatasetSettings.checked(json.loads(line))
        records = Unfailing(open_declared(settings), str)
        found["used"] = len(records)
        found["read"] = sum(len(labels) for _, labels in records.readable_batches())
    except DpagentError as error:
        found["refused"] = str(error)
    records = None
    found["peak"] = status("VmHWM") - before
    print(json.dumps(found), flush=True)
"""


def read_all(*settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What is made of declared data, each in turn in one process: what is read, or why not, and MiB."""
    lines = "".join(json.dumps({"max_records": 1_000} | each) + "\n" for each in settings)
    result = subprocess.run(
        [sys.executable, "-c", READ], input=lines, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
