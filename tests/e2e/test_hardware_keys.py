"""A board whose key is in a TPM or in a PKCS #11 token.

The TPM is a software one (swtpm), reached through the resource manager as a real one is; the token is
SoftHSM's. OpenSSL's providers `tpm2-openssl` and `pkcs11-provider` use them, by the configurations of
docs/deploy.md, in the board's programs alone. Debian 12 has no `pkcs11-provider`: one that was built from its
source is found by PKCS11_PROVIDER_MODULES, the directory that it is in.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

import pytest
from brokers import BrokerFactory, reserved_port, wait_until
from children import Child
from commands import dpagent_process
from enrolments import EnrolmentFleet, mutual_tls
from fleets import Program, digits

from agent.audit import audit
from agent.charges import Charge
from agent.identity import durable_key, read_certificate
from agent.settings import load_agent_settings
from dpagent.errors import ConfigurationError, ExitCode
from dpagent.learning.data.formats.npz import save_npz

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"
PROGRAMS = ("swtpm", "tpm2-abrmd", "dbus-daemon", "openssl")
_INSTALL_TPM = "apt-get install swtpm tpm2-openssl tpm2-abrmd libtss2-tcti-tabrmd0 dbus"
QUICK = (
    *("--set", "limits.minimum_compute_slot_s=0.001", "--set", "limits.minimum_jitter_window_s=0"),
    *("--set", "limits.minimum_fragments=1", "--set", "limits.messages_per_second=200"),
)


@dataclass(frozen=True)
class Hardware:
    """What holds a key.

    Attributes:
        environment: by which programs use it.
        key: as `dpagent enrol --key` takes it.
        label: of the file that names a key there.
    """

    environment: dict[str, str]
    key: str
    label: str


@pytest.fixture(params=["TPM", "PKCS #11"])
def hardware(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hardware]:
    """A TPM, or a token, with a key in it."""
    made = in_tpm(tmp_path) if request.param == "TPM" else in_token(tmp_path)
    with made as found:
        yield found


def configuration(provider: str) -> str:
    """The text of ``openssl.cnf`` for a provider, as docs/deploy.md has it."""
    found = re.findall(r"^```ini\n(openssl_conf.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (text,) = [each for each in found if f"{provider} = " in each]
    return text


@contextlib.contextmanager
def in_token(tmp_path: Path) -> Iterator[Hardware]:
    for program in ("softhsm2-util", "pkcs11-tool", "openssl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed: apt-get install softhsm2 opensc openssl")
    said = subprocess.run(["openssl", "version", "-m"], capture_output=True, text=True, check=True).stdout
    modules = os.environ.get("PKCS11_PROVIDER_MODULES") or said.partition('"')[2].rpartition('"')[0]
    library = next(Path("/usr/lib").glob("**/softhsm/libsofthsm2.so"), None)
    if library is None or not Path(modules, "pkcs11.so").exists():
        pytest.skip("pkcs11-provider is not installed: from Debian 13 on, apt-get install pkcs11-provider")
    directory = tmp_path / "token"
    (directory / "tokens").mkdir(parents=True)
    (directory / "softhsm2.conf").write_text(f"directories.tokendir = {directory / 'tokens'}\n")
    (directory / "pin").write_text("4321\n")
    text = configuration("pkcs11")
    for name, value in (("path", library), ("token-pin", f"file:{directory / 'pin'}")):
        text, number = re.subn(f"(?m)^pkcs11-module-{name} = .*$", f"pkcs11-module-{name} = {value}", text)
        assert number == 1
    (directory / "openssl.cnf").write_text(text)
    of_token = {"SOFTHSM2_CONF": str(directory / "softhsm2.conf")}
    for command in (
        ["softhsm2-util", "--init-token", "--free", "--label", "board", "--so-pin", "12345678",
         "--pin", "4321"],
        ["pkcs11-tool", "--module", library, "--login", "--pin", "4321", "--token-label", "board",
         "--keypairgen", "--key-type", "EC:prime256v1", "--label", "device", "--id", "01"],
    ):  # fmt: skip
        subprocess.run(command, env=os.environ | of_token, capture_output=True, timeout=60, check=True)
    environment = of_token | {"OPENSSL_CONF": str(directory / "openssl.cnf"), "OPENSSL_MODULES": modules}
    key = "pkcs11:token=board;object=device;type=private"
    yield Hardware(environment, key, "PKCS#11 PROVIDER URI")


@contextlib.contextmanager
def in_tpm(tmp_path: Path) -> Iterator[Hardware]:
    for program in PROGRAMS:
        if shutil.which(program) is None and shutil.which(program, path="/usr/sbin") is None:
            pytest.skip(f"{program} is not installed: {_INSTALL_TPM}")
    if find_library("tss2-tcti-tabrmd") is None:
        pytest.skip(f"the library that reaches the TPM is not installed: {_INSTALL_TPM}")
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
        (directory / "openssl.cnf").write_text(configuration("tpm2"))
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
        yield Hardware(environment, str(key), "TSS2 PRIVATE KEY")


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
    tmp_path: Path, new_broker: BrokerFactory, hardware: Hardware, monkeypatch: pytest.MonkeyPatch
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
        for name, value in hardware.environment.items():
            monkeypatch.setenv(name, value)
        enrolled = dpagent_process(
            "enrol", code, "--key", hardware.key, "--config", board / "agent.yaml",
            "--data", board / "data.npz", "--epsilon", "6",
        )  # fmt: skip
        assert (enrolled.returncode, "Connected to mqtts" in enrolled.stdout) == (0, True), enrolled.stderr
        settings = load_agent_settings(board / "agent.yaml")
        assert settings.mqtt.key_file is not None
        assert settings.mqtt.cert_file is not None
        assert hardware.label in settings.mqtt.key_file.read_text()
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


def test_a_key_that_the_hardware_does_not_give_is_named(tmp_path: Path, hardware: Hardware) -> None:
    """Without the provider's configuration, as where openssl.cnf was forgotten. Nothing of it is left."""
    file = tmp_path / "device.key"
    with pytest.raises(ConfigurationError, match=r"Its provider has to be in openssl\.cnf"):
        durable_key(file, hardware.key)
    assert not file.exists()
