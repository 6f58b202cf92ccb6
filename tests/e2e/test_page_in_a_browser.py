"""A fleet is started, watched and stopped from a real browser, by keyboard, on a desk and on a telephone."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from brokers import BrokerFactory, reserved_port, wait_until
from browsers import SIZES, Window, axe_script, chromium
from fleets import (
    Program,
    digits,
    run_agent,
    run_coordinator,
    write_agent,
    write_fleet,
    write_job,
    write_shared,
)
from gapped_rounds import keep_gapped_rounds
from page_servers import PageServer
from postgresql import Postgresql, new_place
from stores import BLANK_MODEL, begin, open_store

from coordinator.keys import load_signer
from coordinator.planning import new_job
from coordinator.settings import load_coordinator_settings, load_fleet_settings
from coordinator.shared_store import Workers
from dpagent.learning.data.formats.npz import save_npz

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHOTS = os.environ.get("PAGE_PICTURES")
"""A directory for pictures of what the test sees, for people."""


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return axe_script(tmp_path_factory.mktemp("axe"))


def keys(page: Any, *pressed: str) -> None:
    for each in pressed:
        page.keyboard.press(each)


def reach(page: Any, selector: str) -> None:
    """Come to an element by the Tab key alone, from where the focus is."""
    for _ in range(120):
        if page.evaluate("selector => document.activeElement?.matches(selector) ?? false", selector):
            return
        page.keyboard.press("Tab")
    pytest.fail(f"the Tab key does not lead to {selector}")


def picture(window: Window, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        window.page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)


def require_fine(window: Window, name: str) -> None:
    picture(window, name)
    assert "\n".join(window.findings()) == ""
    assert not window.overflows()
    assert window.complaints == []


def test_a_fleet_is_started_watched_and_stopped_from_the_browser(
    tmp_path: Path, new_broker: BrokerFactory, axe: str
) -> None:
    broker = new_broker("mosquitto").start()
    file = write_shared(tmp_path / "fleet", broker, fleet="meadow")
    save_npz(file.parent / "test.npz", digits(1_500, 1_700))
    settings = load_coordinator_settings(file)
    key = load_signer(settings.keys_dir, settings.fleet).public_key
    agents = [
        write_agent(tmp_path / f"board-{n}", broker, key, n, fleet="meadow", budget={"epsilon": 20.0})
        for n in (1, 2)
    ]
    job = write_job(
        tmp_path / "job.yaml", rounds=4,
        test_data={"path": "test.npz", "kind": "npz", "classes": 10, "shape": [8, 8, 1], "dtype": "float32"},
        round={"compute_slot_s": 0.3, "jitter_window_s": 0.3, "deadline_s": 60.0, "device_grid_s": 0.001},
    ).read_text()  # fmt: skip
    with reserved_port() as port, chromium(axe) as opened:
        number = port.getsockname()[1]
        address = f"http://127.0.0.1:{number}/"
        serving = Program(
            "coordinator",
            "serve",
            "--config",
            file,
            "--set",
            f"page.port={number}",
            log=tmp_path / "page.log",
        )
        with serving:
            wait_until(lambda: "is at http://" in serving.said(), "the page")
            desk, telephone, dark = opened("desktop"), opened("telephone"), opened("telephone", "dark")
            for each in (desk, telephone, dark):
                each.page.goto(address)
                each.page.get_by_text("No job yet").wait_for()
            page = desk.page
            page.get_by_text("No coordinator runs here").first.wait_for()
            require_fine(desk, "1-empty-desktop")
            require_fine(telephone, "1-empty-telephone")

            # A job is added by keyboard, and waits.
            reach(page, ".skip")
            keys(page, "Enter")
            reach(page, "#adding > summary")
            keys(page, "Enter")
            reach(page, "#add-name")
            page.keyboard.type("meters")
            reach(page, "#add-text")
            page.keyboard.insert_text(job.replace("rounds: 4", "rounds: none"))
            reach(page, "#add-later")
            keys(page, "Space")
            reach(page, "#add-submit")
            keys(page, "Enter")
            page.locator("#add-error").get_by_text("rounds").wait_for()
            desk.complaints.clear()  # The browser complains of the refusal.
            require_fine(desk, "2-refused-desktop")
            page.fill("#add-text", job)
            page.focus("#add-submit")
            keys(page, "Enter")
            page.locator("#said").get_by_text("It is paused, and waits").wait_for()
            page.get_by_role("heading", name="meters").wait_for()
            assert page.locator("#adding").get_attribute("open") is None

            with run_coordinator(file, "--stay"), run_agent(agents[0]), run_agent(agents[1]):
                page.locator("#health").get_by_text("connected to mqtt://").wait_for()
                page.locator("#banners .banner").wait_for(state="detached")
                # It is started on the telephone, and watched on all.
                telephone.page.locator("#resume").focus()
                keys(telephone.page, "Enter")
                page.locator("#open-round").wait_for()
                picture(desk, "3-open-desktop")
                assert page.locator("#open-round [role=progressbar]").get_attribute("aria-valuemax") == "10"
                page.get_by_role("heading", name="Confusion matrix").wait_for()
                page.locator("#pause").focus()
                keys(page, "Enter")
                page.locator("#said").get_by_text("is paused").wait_for()
                page.locator("#resume").wait_for()
                require_fine(desk, "4-paused-desktop")
                page.locator("#resume").focus()
                keys(page, "Enter")
                page.locator("#job-title").get_by_text("finished").wait_for(timeout=120_000)
                page.locator("#figure-accuracy").get_by_text(re.compile(r"\d\s%")).first.wait_for()
                closed = page.locator("#part-figures").inner_text()
                assert "4 of 4" in closed
                for name, each in (("desktop", desk), ("telephone", telephone), ("telephone-dark", dark)):
                    each.page.locator("#download-report").wait_for()
                    require_fine(each, f"5-finished-{name}")

                # What a reader of tables gets, and what is downloaded.
                page.locator("#table-accuracy > summary").focus()
                keys(page, "Enter")
                rows = page.locator("#table-accuracy tbody tr").all_inner_texts()
                assert [row.split()[0] for row in rows] == ["4", "3", "2", "1"]
                for link, begins in (("#download-model", b""), ("#download-report", b"<!DOCTYPE html>")):
                    with page.expect_download(timeout=120_000) as download:
                        page.locator(link).click()
                    data = Path(download.value.path()).read_bytes()
                    assert data.startswith(begins)
                    assert len(data) > 1_000

                # Another one is cancelled, after a question.
                page.locator("#adding > summary").click()
                page.fill("#add-name", "other")
                page.fill("#add-text", job)
                page.locator("#add-submit").click()
                page.get_by_role("link", name="other").click()
                page.locator("#cancel").focus()
                keys(page, "Enter")
                page.locator("#cancelling").wait_for()
                require_fine(desk, "6-question-desktop")
                keys(page, "Escape")
                page.locator("#cancelling").wait_for(state="hidden")
                page.locator("#cancel").focus()
                keys(page, "Enter")
                reach(page, "#cancel-confirm")
                keys(page, "Enter")
                page.locator("#job-title").get_by_text("cancelled").wait_for(timeout=60_000)
                log = page.locator("#orders").inner_text()
                assert "cancelled job other" in log
                assert ", by the page" in log

                broker.kill()
                page.locator("#banners").get_by_text("has been away").wait_for(timeout=60_000)
                require_fine(desk, "7-broker-away-desktop")
                require_fine(telephone, "7-broker-away-telephone")
        page.locator("#live").get_by_text("Not live").wait_for()
        picture(desk, "8-lost-desktop")


def test_a_holder_of_a_token_signs_in(tmp_path: Path, new_broker: BrokerFactory, axe: str) -> None:
    """A proxy's or another user's browser has no local user: here another name of the loopback address."""
    file = write_shared(tmp_path / "fleet", new_broker("mosquitto"), fleet="meadow")
    settings = load_coordinator_settings(file)
    from coordinator.page.tokens import Role, make_token

    token = make_token(settings.keys_dir, Role.VIEWER)
    with reserved_port() as port, chromium(axe) as opened:
        number = port.getsockname()[1]
        options = [
            "--set",
            f"page.port={number}",
            "--set",
            "page.proxies=[127.0.0.1]",
            "--set",
            "page.proxy_user=nobody",
        ]
        listening = ["--set", "page.listen=127.0.0.2", "--set", "page.hosts=[127.0.0.2]"]
        serving = Program(
            "coordinator", "serve", "--config", file, *options[:2], *listening, log=tmp_path / "page.log"
        )
        with serving:
            wait_until(lambda: "is at http://" in serving.said(), "the page")
            for size in SIZES:
                window = opened(size)
                window.page.goto(f"http://127.0.0.2:{number}/login")
                require_fine(window, f"0-sign-in-{size}")
                window.page.fill("#token", "nonsense")
                window.page.keyboard.press("Enter")
                window.page.get_by_text("That is no token").wait_for()
                window.complaints.clear()  # The browser complains of the refusal.
                window.page.fill("#token", token)
                window.page.keyboard.press("Enter")
                window.page.get_by_text("No job yet").wait_for()
                window.page.locator("#visitor").get_by_text("holder of the viewer").wait_for()
                assert window.page.locator("#adding").is_hidden()
                require_fine(window, f"0-viewer-{size}")
                window.page.locator("#logout").click()
                window.page.locator("#token").wait_for()


def test_workers_are_shown_to_everybody_who_looks(tmp_path: Path, postgresql: Postgresql, axe: str) -> None:
    place = new_place(postgresql)
    store = {"url": place.url, "password_file": str(postgresql.password_file)}
    settings = load_fleet_settings(write_fleet(tmp_path / "fleet", None, store=store))
    kept = open_store(place, new_job(settings), settings.job().stored())
    begin(kept, BLANK_MODEL)
    kept.start_round(1, 10.0, 70.0)
    workers = Workers(kept.database)
    numbers = [workers.register(f"counting-{number}", "1.0") for number in (1, 2)]
    with PageServer(settings, tmp_path / "fleet") as server, chromium(axe) as opened:
        for size in SIZES:
            window = opened(size)
            window.page.goto(f"http://{server.host}/")
            window.page.locator("#workers").get_by_text("counting-2").wait_for()
            require_fine(window, f"9-workers-{size}")
        page = window.page
        assert page.locator("#workers .chip.running").count() == 2
        for number in numbers:
            workers.end(number)
        page.locator("#banners").get_by_text("No worker counts fragments").wait_for()
        require_fine(window, "9-no-worker")
    kept.database.close()


def test_rounds_keep_their_places_after_some_that_were_given_up(tmp_path: Path, axe: str) -> None:
    """A sixth of the width for each round, from the first that is shown; ε is of all that cost some."""
    settings = load_fleet_settings(write_fleet(tmp_path / "fleet", None, rounds=6))
    keep_gapped_rounds(settings)
    with PageServer(settings, tmp_path / "fleet") as server, chromium(axe) as opened:
        window = opened("desktop")
        page = window.page
        page.goto(f"http://{server.host}/")
        page.locator("#chart-accuracy svg circle").wait_for()
        for name, rounds, at in (
            ("accuracy", ["4", "1"], 3 / 5),
            ("epsilon", ["5", "4", "3", "2", "1"], 4 / 5),
        ):
            cells = page.locator(f"#table-{name} tbody tr").evaluate_all(
                "rows => rows.map(row => row.children[0].textContent)"
            )
            assert cells == rounds
            width = float(page.locator(f"#chart-{name} svg").get_attribute("viewBox").split()[2])
            last = float(page.locator(f"#chart-{name} svg circle").get_attribute("cx"))
            assert last == pytest.approx(46 + (width - 58) * at, abs=0.1)
        figures = page.locator("dl.figures").inner_text()
        assert "about 5.0\N{NO-BREAK SPACE}s more" in figures, "one round is left"
        assert window.complaints == []
