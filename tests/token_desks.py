"""A coordinator's side of tokens without a broker: real keys, a real registry, the real issuer."""

from __future__ import annotations

from pathlib import Path

from members import enrolled, new_authority

from agent.identity import Identity
from coordinator.blind_signing import PrivateKey
from coordinator.columns import spent_columns
from coordinator.database.settings import StorePlace
from coordinator.devices import Devices
from coordinator.issuing import Issuer
from coordinator.job import Job
from coordinator.registry import AnnouncedKey, Entry, Registry, RegistryReader
from dpagent.privacy.mechanisms.job_noise import JobNoise
from dpagent.privacy.mechanisms.two_point_rounds import TwoPointRounds
from dpagent.protocol.issuing import AskOpener
from dpagent.protocol.messages import Linkability
from dpagent.protocol.sealing import new_sealing_secret
from dpagent.protocol.signing import Signer
from dpagent.protocol.tokens import RoundKey, TokenKeys

FLEET, JOB = "testers", b"j" * 16
EPSILONS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
_keys: dict[tuple[int, int], PrivateKey] = {}
"""By number and classes: to make one takes longer than most tests."""


def private_key(number: int, classes: int) -> PrivateKey:
    if (number, classes) not in _keys:
        _keys[number, classes] = PrivateKey.generate(classes)
    return _keys[number, classes]


class Desk:
    """Issues tokens of a job.

    Args:
        directory: for the members directory.
        signer: the coordinator's.
        tokens: of a device in a round.
        rounds: whose keys there are, from the first on.
        linkability: of the job.
        job: its id.
        device_epsilon: the most that a device is granted.
        noise: of the job; by default noise on sums, for each record.
        sealing_secret: of requests; by default a fresh one.
    """

    def __init__(
        self,
        directory: Path,
        signer: Signer,
        *,
        tokens: int = 4,
        rounds: int = 3,
        linkability: Linkability = "fragment",
        job: bytes = JOB,
        device_epsilon: float | None = None,
        noise: JobNoise | TwoPointRounds | None = None,
        sealing_secret: bytes = b"",
        place: StorePlace | None = None,
    ) -> None:
        self.signer, self.members_dir = signer, directory
        self.directory = directory
        if not (directory / "ca.crt").exists():
            self.authority = new_authority(directory, FLEET)
        self._place = place or directory
        self.devices, self.registry = Devices(self._place), Registry(self._place)
        self.sealing_secret, self.now = sealing_secret or new_sealing_secret(), 5_000.0
        self.opener = AskOpener(self.sealing_secret, FLEET)
        on_sums = JobNoise.chosen("discrete-gaussian", (2.0,) * len(EPSILONS))
        terms = {"privacy": {"delta": 1e-5}, "fragments_per_update": tokens}
        self.job = Job(job, terms, noise or on_sums, EPSILONS)
        self.issuer = Issuer(
            FLEET, opener=self.opener, devices=self.devices, registry=self.registry,
            device_epsilon=device_epsilon, now=lambda: self.now,
        )  # fmt: skip
        moduli = []
        for number in range(1, rounds + 1):
            key = private_key(number, tokens)
            moduli.append(key.modulus.to_bytes(256, "big"))
            columns = spent_columns(self.job, rounds=number, epsilon=EPSILONS[number - 1], devices=1)
            if self.registry.key(job, number) is None:
                announced = AnnouncedKey(
                    job.hex(), number, linkability, tokens, self.opener.public_key, moduli[-1]
                )
                self.registry.add_key(announced, key.to_bytes(), columns)
        assert linkability != "none"
        self.keys = TokenKeys(
            job=job, linkability=linkability, tokens=tokens, sealing_key=self.opener.public_key,
            first_round=1, moduli=moduli,
        )  # fmt: skip

    def close(self) -> None:
        self.devices.close()
        self.registry.close()

    def member(self, *, replaces: str | None = None) -> Identity:
        identity, _ = enrolled(self.authority, self.devices, replaces=replaces)
        return identity

    @property
    def signed_keys(self) -> bytes:
        return self.signer.sign(self.keys, "token-keys")

    def round_key(self, number: int) -> RoundKey:
        return RoundKey.of(self.keys, number, FLEET)

    def answer(self, device: str, payload: bytes) -> bytes:
        """The signed answer to a request, as it is published."""
        return self.signer.sign(self.issuer.answer(device, payload, self.keys).answer, "answer")

    def entries(self) -> list[Entry]:
        reader = RegistryReader(self._place)
        try:
            return reader.entries()
        finally:
            reader.close()
