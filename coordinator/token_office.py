"""One-time tokens of a job, as its coordinator handles them: keys made ahead, announced, used and erased."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from coordinator.announcer import Announcer
from coordinator.blind_signing import PrivateKey, forget_keys
from coordinator.columns import spent_columns
from coordinator.devices import Devices
from coordinator.issuing import Issuer
from coordinator.job import Job
from coordinator.registry import AnnouncedKey, Registry
from coordinator.settings import FleetSettings
from coordinator.store import Store
from dpagent.clock import Clock
from dpagent.errors import ConfigurationError
from dpagent.protocol.codec import MessageError, encode
from dpagent.protocol.issuing import AskOpener
from dpagent.protocol.tokens import MAX_ROUNDS_AHEAD, RoundKey, TokenKeys
from dpagent.structured_log import Event, about
from dpagent.transport.events import Received
from dpagent.wording import counted

log = logging.getLogger(__name__)

_AT_ONCE: Final = 8
"""Requests answered before fragments are looked at again: some 16 ms each."""
_MOST_WAITING: Final = 1_024


class TokenOffice:
    """The tokens of one job.

    Args:
        settings: ``fleet.yaml``.
        job: the job.
        store: counts rejections.
        opener: of requests.
        announcer: publishes.
        clock: the program's.

    Raises:
        ConfigurationError: The fleet has no members.
        StorageError: Registry or table of devices cannot be used.
    """

    def __init__(
        self,
        settings: FleetSettings,
        job: Job,
        *,
        store: Store,
        opener: AskOpener,
        announcer: Announcer,
        clock: Clock,
    ) -> None:
        if not settings.has_members:
            raise ConfigurationError(
                f"linkability is {settings.linkability}, and {settings.members_dir} is missing: tokens are "
                "for devices that enrolled. Run `dpagent coordinator ca init`, or set linkability: none."
            )
        self._settings, self._job, self._store, self._announcer = settings, job, store, announcer
        self._sealing_key = opener.public_key
        place = settings.members_place
        self._devices, self._registry = Devices(place), Registry(place)
        self._issuer = Issuer(
            settings.fleet,
            opener=opener,
            devices=self._devices,
            registry=self._registry,
            device_epsilon=settings.tokens.device_epsilon,
            now=clock.unix,
        )
        self._makers = ThreadPoolExecutor(1, thread_name_prefix="token-keys")
        self._making: Future[PrivateKey] | None = None
        self._number = 0
        """Of the round that is open, or opens next."""
        self._keys: TokenKeys | None = None
        self._waiting: list[Received] = []

    def close(self) -> None:
        """Close the databases."""
        self._makers.shutdown(cancel_futures=True)
        self._devices.close()
        self._registry.close()

    @property
    def tokens(self) -> int:
        """Of a device in a round."""
        return self._settings.fragments_per_update if self._settings.linkability == "fragment" else 1

    # Keys.

    def open(self, number: int) -> None:
        """See that a round has its key, and erase those of the rounds before."""
        self._number = number
        self._forget_secrets(number - 1)
        if self._registry.key(self._job.id, number) is None:
            self._keep(number, self._made())
        self._update_list()

    def finish(self) -> None:
        """The job is over: nobody makes a token of it any more."""
        self._forget_secrets(self._settings.rounds)

    def _forget_secrets(self, last_round: int) -> None:
        self._registry.forget_secrets(self._job.id, last_round)
        self._issuer.forget_signed()
        forget_keys()  # Those of open rounds are read again.

    def tend(self) -> None:
        """Make keys ahead, in the background, and announce each; answer some of the requests that wait."""
        if self._keys is not None and self._keys.rounds.stop <= self._last_round:
            if self._making is None:
                self._making = self._makers.submit(PrivateKey.generate, self.tokens)
            elif self._making.done():
                self._keep(self._keys.rounds.stop, self._made())
                self._update_list()
                self.announce()
        self._answer_some()

    @property
    def _last_round(self) -> int:
        """Whose key is to be announced now."""
        return min(self._settings.rounds, self._number + self._settings.tokens.rounds_ahead)

    def _made(self) -> PrivateKey:
        making, self._making = self._making, None
        return PrivateKey.generate(self.tokens) if making is None else making.result()

    def _keep(self, number: int, key: PrivateKey) -> None:
        announced = AnnouncedKey(
            self._job.id.hex(), number, self._settings.linkability, self.tokens, self._sealing_key,
            key.modulus.to_bytes(256, "big"),
        )  # fmt: skip
        # Of the whole job, which boards reserve with their first round: it may end in the light of its
        # results, and then no smaller figure is a bound.
        whole = self._job.epsilon_by_round
        columns = spent_columns(self._job, rounds=len(whole), epsilon=whole[-1], devices=1)
        self._registry.add_key(announced, key.to_bytes(), columns)

    def _update_list(self) -> None:
        moduli: list[bytes] = []
        for number in range(self._number, self._last_round + 1):
            if (key := self._registry.key(self._job.id, number)) is None:
                break
            moduli.append(key.modulus)
        linkability = self._settings.linkability
        assert linkability != "none"
        self._keys = TokenKeys(
            job=self._job.id,
            linkability=linkability,
            tokens=self.tokens,
            sealing_key=self._sealing_key,
            first_round=self._number,
            moduli=moduli,
        )

    def announce(self) -> None:
        """Publish the list of keys, if there is one."""
        if self._keys is not None:
            self._announcer.announce_keys(self._keys)

    def encoded_keys(self) -> bytes:
        """The list of keys, for workers."""
        assert self._keys is not None
        return encode(self._keys)

    def round_key(self, number: int) -> RoundKey:
        """The public key of a round that is open."""
        assert self._keys is not None
        return RoundKey.of(self._keys, number, self._settings.fleet)

    def give_up(self, number: int) -> None:
        """A round is given up: nobody makes a token of it any more."""
        self._forget_secrets(number)

    def members(self) -> int:
        """How many devices may take part in a round."""
        return self._devices.members()

    def expected(self, number: int) -> int:
        """How many members may send for a round: all but those that have declined it or were refused. One
        that has not asked yet may still come."""
        absent = map(self._devices.find, self._registry.without_tokens(self._job.id, number))
        return self.members() - sum(1 for each in absent if each is not None and each.is_member)

    def gone(self, number: int, since: float) -> int:
        """How many devices have tokens of a round, and have been members no more since a time (Unix): what
        they sent before counts, and nobody can tell whether they did."""
        left = self._devices.left_since(since)
        with self._registry.database.errors():
            found = [self._registry.entry(each, self._job.id, number) for each in left]
        return sum(each is not None and each.is_granted for each in found)

    # Requests.

    def take(self, messages: Sequence[Received]) -> None:
        """Take requests, to be answered in turn. What is too much, of one device or of all, is dropped:
        devices ask again."""
        by_topic = Counter(message.topic for message in self._waiting)
        for message in messages:
            by_topic[message.topic] += 1
            if by_topic[message.topic] <= MAX_ROUNDS_AHEAD and len(self._waiting) < _MOST_WAITING:
                self._waiting.append(message)

    @property
    def is_busy(self) -> bool:
        """Whether requests wait."""
        return bool(self._waiting)

    def _answer_some(self) -> None:
        """Answer a few requests, so that fragments need not wait for many."""
        some, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
        if self._keys is None or not some:
            return
        rejected: Counter[str] = Counter()
        with self._registry.database.errors():
            for message in some:
                try:
                    issued = self._issuer.answer(message.topic.split("/")[-2], message.payload, self._keys)
                except MessageError as error:
                    log.debug("rejected a request for tokens: %s", error)
                    rejected[error.reason] += 1
                else:
                    self._announcer.answer(issued.device, issued.answer)
        for reason, count in rejected.items():
            log.warning(
                "rejected %s for tokens: %s", counted(count, "request"), reason,
                extra=about(event=Event.REJECTED, count=count, reason=f"request, {reason}"),
            )  # fmt: skip
            self._store.reject(f"request, {reason}", count)
