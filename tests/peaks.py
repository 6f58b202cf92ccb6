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
from agent.records import Records
from agent.data_settings import DataSettings
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
        records = Records(DataSettings.model_validate(json.loads(line)))
        found["used"] = len(records.dataset)
        found["read"] = records.attempt(
            lambda dataset: sum(len(labels) for _, labels in dataset.readable_batches())
        )
    except DpagentError as error:
        found["refused"] = str(error)
    records = None
    found["peak"] = status("VmHWM") - before
    print(json.dumps(found), flush=True)
"""


def read_all(*settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What a board makes of data, each in turn in one process: what it reads, or why it refuses, and MiB."""
    lines = "".join(json.dumps({"name": "x", "max_records": 1_000} | each) + "\n" for each in settings)
    result = subprocess.run(
        [sys.executable, "-c", READ], input=lines, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]
