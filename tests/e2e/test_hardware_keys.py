"""A board whose key is in a TPM: a software one (swtpm), reached through the resource manager as a real one
is.

OpenSSL's provider `tpm2-openssl` uses it, by the configuration of docs/deploy.md, in the board's programs
alone.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from brokers import BrokerFactory, reserved_port, wait_until
from children import Child
from commands import dpagent_process
from enrolments import EnrolmentFleet, mutual_tls
from fleets import Program, digits

from agent.audit import audit
from agent.charges import Charge
from agent.identity import read_certificate, read_private_key
from agent.settings import load_agent_settings
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.learning.data.formats.npz import save_npz

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
PROGRAMS = ("swtpm", "tpm2-abrmd", "dbus-daemon", "openssl")
QUICK = (
    *("--set", "limits.minimum_compute_slot_s=0.001", "--set", "limits.minimum_jitter_window_s=0"),
    *("--set", "limits.minimum_fragments=1", "--set", "limits.messages_per_second=200"),
)


@pytest.fixture
def hardware(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A TPM; yields the environment by which programs use it."""
    for program in PROGRAMS:
        if shutil.which(program) is None and shutil.which(program, path="/usr/sbin") is None:
            pytest.skip(f"{program} is not installed: apt-get install swtpm tpm2-openssl tpm2-abrmd dbus")
    directory = tmp_path / "tpm"
    (directory / "state").mkdir(parents=True)
    with ExitStack() as running:
        port = two_ports(running)
        running.enter_context(
            Child(
                [
                    "swtpm", "socket", "--tpm2", "--tpmstate", f"dir={directory / 'state'}",
                    "--server", f"type=tcp,port={port}", "--ctrl", f"type=tcp,port={port + 1}",
                    "--flags", "not-need-init,startup-clear",
                ],
                directory / "swtpm.log",
            )
        )  # fmt: skip
        bus = running.enter_context(
            Child(["dbus-daemon", "--session", "--nofork", "--print-address"], directory / "bus.log")
        )
        address = wait_until(lambda: re.search(r"unix:\S+", bus.said()), "the message bus").group()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DBUS_SESSION_BUS_ADDRESS", address)
            manager = ["tpm2-abrmd", "--session", "--allow-root", f"--tcti=swtpm:host=127.0.0.1,port={port}"]
            running.enter_context(Child(manager, directory / "manager.log"))
        (blocks,) = re.findall(r"^```ini\n(openssl_conf.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        (directory / "openssl.cnf").write_text(blocks)
        environment = {
            "DBUS_SESSION_BUS_ADDRESS": address,
            "OPENSSL_CONF": str(directory / "openssl.cnf"),
            "TPM2OPENSSL_TCTI": "tabrmd:bus_type=session",
        }
        key = directory / "key.pem"

        def makes_a_key() -> bool:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in environment.items():
                    patch.setenv(name, value)
                made = subprocess.run(
                    [
                        "openssl", "genpkey", "-propquery", "provider=tpm2", "-algorithm", "EC", "-pkeyopt",
                        "group:P-256", "-out", key,
                    ],
                    capture_output=True, timeout=60, check=False,
                )  # fmt: skip
            # Until the TPM answers, OpenSSL makes a key of its own, without a word.
            return made.returncode == 0 and "TSS2 PRIVATE KEY" in key.read_text()

        wait_until(makes_a_key, "a key in the TPM")
        key.chmod(0o600)
        yield environment


def two_ports(running: ExitStack) -> int:
    """A port, of which the next one is free too: the library looks for the control channel there."""
    while True:
        port = running.enter_context(reserved_port()).getsockname()[1]
        above = running.enter_context(socket.socket())
        above.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            above.bind(("127.0.0.1", port + 1))
            return int(port)


# OpenSSL reads its configuration when a program starts.
@pytest.mark.usefixtures("executed")
@pytest.mark.slow
def test_a_board_enrols_takes_part_and_renews_with_a_key_that_it_does_not_have(
    tmp_path: Path, new_broker: BrokerFactory, hardware: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tmp_path / "fleet" / "members"
    broker = mutual_tls(new_broker, members)
    fleet = EnrolmentFleet(
        tmp_path / "fleet", f"mqtts://127.0.0.1:{broker.port}", rounds=1, devices=1, linkability="fragment",
        enrolment={"certificate_days": 0.02},
    ).start()  # fmt: skip
    broker.start()
    board = tmp_path / "board"
    board.mkdir()
    save_npz(board / "data.npz", digits(0, 50))
    (code,) = fleet.invite()
    run = Program("coordinator", "run", "--config", fleet.file, log=tmp_path / "run.log")
    with run as coordinator:
        for name, value in hardware.items():
            monkeypatch.setenv(name, value)
        enrolled = dpagent_process(
            "enrol", code, "--key", tmp_path / "tpm" / "key.pem", "--config", board / "agent.yaml",
            "--data", board / "data.npz", "--epsilon", "6",
        )  # fmt: skip
        assert (enrolled.returncode, "Connected to mqtts" in enrolled.stdout) == (0, True), enrolled.stderr
        settings = load_agent_settings(board / "agent.yaml")
        assert settings.mqtt.key_file is not None
        assert settings.mqtt.cert_file is not None
        assert "TSS2 PRIVATE KEY" in settings.mqtt.key_file.read_text()
        before = read_certificate(settings.mqtt.cert_file)
        agent = Program("run", "--config", board / "agent.yaml", *QUICK, log=tmp_path / "log")
        with agent:
            wait_until(lambda: "the certificate is renewed" in agent.said(), "a renewal")
            assert coordinator.wait(200) == ExitCode.OK
            assert "has its tokens" in agent.said()
    after = read_certificate(settings.mqtt.cert_file)
    assert (after.public_key(), after == before) == (before.public_key(), False)
    assert any(isinstance(entry.record, Charge) for entry in audit(settings.state_dir).entries)
    fleet.stop()


def test_a_key_that_the_hardware_does_not_give_is_named(tmp_path: Path, hardware: dict[str, str]) -> None:
    """Without the provider's configuration, as where openssl.cnf was forgotten."""
    del hardware
    key = tmp_path / "tpm" / "key.pem"
    with pytest.raises(ConfigurationError, match=r"Its provider has to be in openssl\.cnf"):
        read_private_key(key)
