"""Sessions of ONNX Runtime that take a model's bytes alone and print nothing, and the errors they raise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Else builds of it keep an identifier of the machine and a record of what runs in the user's home, for a
# service of its makers whose address they have. To be set before the import.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as _runtime

from dpagent.errors import require_count
from dpagent.learning.subnormals import are_flushed, flush_subnormals

# The runtime's errors share no base class but Exception, and differ between versions.
RUNTIME_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for name in (
        "EPFail",
        "EngineError",
        "Fail",
        "InvalidArgument",
        "InvalidGraph",
        "InvalidProtobuf",
        "ModelLoadCanceled",
        "ModelLoaded",
        "ModelRequiresCompilation",
        "NoModel",
        "NoSuchFile",
        "NotFound",
        "NotImplemented",
        "RuntimeException",
    )
    if isinstance(kind := getattr(_runtime, name, None), type) and issubclass(kind, Exception)
)
LOAD_ERRORS: tuple[type[Exception], ...] = (*RUNTIME_ERRORS, ValueError, TypeError)


def quiet_session(model: bytes, *, threads: int = 1, sizes: Mapping[str, int] | None = None) -> Any:
    """A session on the CPU that prints nothing; raises one of :data:`LOAD_ERRORS`.

    A model is the bytes alone: one whose constants lie in other files is refused.

    Args:
        model: the file's bytes.
        threads: how many threads one call may use.
        sizes: of free dimensions, by their names.
    """
    options = onnxruntime.SessionOptions()
    for name, size in (sizes or {}).items():
        options.add_free_dimension_override_by_name(name, size)
    # Below it nothing can lie. Otherwise a model could name files of this directory as its constants.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    # Not the runtime's own format: as that, a file could hold another network than the one looked at.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    options.intra_op_num_threads = require_count("threads", threads)
    options.inter_op_num_threads = 1
    options.log_severity_level = 4  # Errors are raised; nothing is printed.
    # The fallback would print that it tries the same again.
    flushes = are_flushed()
    session = onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], enable_fallback=False
    )
    if flushes:
        flush_subnormals()  # The first session of a process has switched that off.
    return session


def first_line(error: Exception) -> str:
    """Its message without the trace that the runtime appends."""
    return str(error).partition("\n")[0]
