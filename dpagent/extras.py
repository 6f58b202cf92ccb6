"""Dependencies that may be missing: the extra that contains a package, and the command to install it.

No package index has this project yet, so "pip install dpagent[...]" would fail. pip's record of
the installation gives the program's source (PEP 610, ``direct_url.json``).
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from dpagent.errors import ConfigurationError

Extra = Literal[
    "coordinator", "page", "report", "metrics", "images", "websockets", "postgresql", "demo", "simulation"
]

ONNX_RUNTIME: Final = "onnxruntime"
"""Installed with the agent where there is one: on 64-bit processors of Arm and x86."""
_OWN: Final = frozenset({"dpagent", "agent", "coordinator", "simulation", "cli", "firmware_profiles"})


@contextmanager
def extra_needed(extra: Extra, purpose: str) -> Iterator[None]:
    """Turn a missing package into a sentence with the extra and the command to install it.

    Args:
        extra: contains the packages imported inside.
        purpose: the part that needs them, as the subject of a sentence ("The coordinator").

    Raises:
        ConfigurationError: a third-party package is missing.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in _OWN:
            raise
        raise ConfigurationError(
            f"{purpose} needs the Python package {package!r}, which cannot be imported. Install the extra "
            f"{extra!r}: {install_command(extra)}"
        ) from error


def require_package(name: str) -> None:
    """See that a package is there, without loading it: another program will.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def require_onnx_runtime(purpose: str) -> None:
    """See that ONNX Runtime is there, without loading it.

    Args:
        purpose: the part that needs it, as the subject of a sentence ("`dpagent predict`").

    Raises:
        ConfigurationError: it is not installed.
    """
    if importlib.util.find_spec(ONNX_RUNTIME) is None:
        raise ConfigurationError(
            f"{purpose} needs the Python package {ONNX_RUNTIME!r}, which is not installed. {runtime_remedy()}"
        )


def runtime_remedy() -> str:
    """What to do where ONNX Runtime is missing, as a sentence."""
    if sys.maxsize < 2**32:
        return "It has no build for systems of 32 bits: take one of 64 bits."
    return f"Install it: {shlex.quote(sys.executable)} -m pip install {ONNX_RUNTIME}"


def install_command(extra: Extra) -> str:
    """The command that adds an extra to this installation."""
    return f"{shlex.quote(sys.executable)} -m pip install {_requirement(extra)}"


def _requirement(extra: Extra) -> str:
    """The program with an extra, from its source."""
    from importlib.metadata import PackageNotFoundError, distribution  # 1.5 MiB that few programs need

    try:
        found = json.loads(distribution("dpagent").read_text("direct_url.json") or "{}")
        url, is_editable = str(found.get("url", "")), bool(found.get("dir_info", {}).get("editable"))
    except (PackageNotFoundError, ValueError, AttributeError):
        return f"'.[{extra}]'  (in a checkout of dpagent)"
    if url.startswith("file:") and "dir_info" in found:
        source = shlex.quote(f"{unquote(urlsplit(url).path)}[{extra}]")
        return f"--editable {source}" if is_editable else source
    if url:
        vcs = found.get("vcs_info", {}).get("vcs")
        return shlex.quote(f"dpagent[{extra}] @ {f'{vcs}+' if vcs else ''}{url}")
    return f"'.[{extra}]'  (in a checkout of dpagent)"
