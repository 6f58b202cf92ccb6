"""A real Chromium for the tests of the page, driven by Playwright, and axe to look at what is accessible."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

SIZES: Final = {"desktop": (1280, 900), "telephone": (390, 844)}


def find_chromium() -> str:
    """The browser's program; the test is skipped without one."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("Chromium is not installed")


def axe_script(directory: Path) -> str:
    """axe-core, as npm installs it now; the test is skipped where it cannot."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    command = [
        "npm",
        "install",
        "--no-audit",
        "--no-fund",
        "--ignore-scripts",
        "--prefix",
        str(directory),
        "axe-core",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    file = directory / "node_modules" / "axe-core" / "axe.min.js"
    if done.returncode or not file.exists():
        pytest.skip(f"axe-core cannot be installed: {done.stderr[-300:]}")
    return file.read_text(encoding="utf-8")


@dataclass
class Window:
    """One page in one window, and what its console said."""

    page: Any
    complaints: list[str]
    axe: str

    def findings(self) -> list[str]:
        """What axe finds in the page as it is, a line each."""
        # Evaluated by the debugger's protocol, which the page's policy does not bind.
        self.page.evaluate(self.axe)
        found = self.page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {each['help']}: {[node['target'] for node in each['nodes']]}"
            for each in found["violations"]
        ]

    def overflows(self) -> bool:
        """Whether the page is wider than its window."""
        return bool(self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


def complaint_of(line: Any) -> list[str]:
    return [f"{line.text} {line.location['url']}"] if line.type in ("error", "warning") else []


@contextmanager
def chromium(axe: str) -> Iterator[Any]:
    """A browser: call it with a size and a colour scheme for a window."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    program = find_chromium()
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=["--no-sandbox"])

        def opened(size: str, scheme: str = "light") -> Window:
            width, height = SIZES[size]
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True
            )
            page = context.new_page()
            page.set_default_timeout(120_000)
            complaints: list[str] = []
            page.on("console", lambda line: complaints.extend(complaint_of(line)))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            return Window(page, complaints, axe)

        try:
            yield opened
        finally:
            browser.close()
