"""A pure-Python broker (amqtt) as a child process.

``python -m simulation.programs.embedded_broker PORT USER PASSWORD_FILE``

For machines without Mosquitto. It speaks MQTT 3.1.1 and forgets everything when it ends,
which the protocol survives: agents and the coordinator announce and resend open rounds and fragments.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import tempfile
from pathlib import Path


async def _serve(port: int, password_file: Path) -> None:
    from amqtt.broker import Broker

    configuration = {
        "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{port}"}},
        "plugins": {
            "amqtt.plugins.authentication.FileAuthPlugin": {"password_file": str(password_file)},
        },
    }
    broker = Broker(configuration)
    await broker.start()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await broker.shutdown()


def main() -> None:
    """Run until SIGTERM."""
    from pwdlib import PasswordHash
    from pwdlib.hashers.argon2 import Argon2Hasher

    port, user, secret = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    logging.basicConfig(level=logging.ERROR)
    # The password is 24 random bytes and ends with the run: nobody guesses it, however little a guess takes.
    # As shipped, each connection would take a fifth of a second of a core, and 64 MiB.
    hasher = Argon2Hasher(time_cost=1, memory_cost=8, parallelism=1)
    hashed = PasswordHash((hasher,)).hash(secret.read_text().strip())
    with tempfile.TemporaryDirectory() as directory:
        passwords = Path(directory) / "passwords"
        passwords.touch(mode=0o600)
        passwords.write_text(f"{user}:{hashed}\n")
        asyncio.run(_serve(port, passwords))


if __name__ == "__main__":
    main()
