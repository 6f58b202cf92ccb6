"""The way of a fragment into its round: opened, checked, counted and acknowledged, a batch at a time."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

from coordinator.fragment_values import NO_VALUES, FragmentReader, norms_of
from coordinator.influence import HonestNorms
from coordinator.seats import OpenedFragment
from coordinator.settings import FleetSettings
from coordinator.store import BLOCK_FULL, SPENT, Store
from dpagent.clock import Clock
from dpagent.protocol.codec import MessageError
from dpagent.protocol.messages import Fragment, ReceiptTopics
from dpagent.protocol.sealing import Opener
from dpagent.protocol.task import RoundTask
from dpagent.protocol.tokens import RoundKey, token_id, without_token
from dpagent.structured_log import Event, about
from dpagent.wording import counted

log = logging.getLogger(__name__)


class Intake:
    """Takes the fragments of a job.

    Args:
        settings: ``fleet.yaml``.
        job: its id.
        store: counts them.
        opener: opens them.
        acknowledge: sends receipts for ids that count, to where they go; told when the work on them began
            (monotonic).
        clock: the program's.
    """

    def __init__(
        self,
        settings: FleetSettings,
        job: bytes,
        *,
        store: Store,
        opener: Opener,
        acknowledge: Callable[[Sequence[bytes], ReceiptTopics, float], None],
        clock: Clock,
    ) -> None:
        self._settings, self._job, self._store = settings, job, store
        self._opener, self._acknowledge, self._clock = opener, acknowledge, clock
        self._task: RoundTask | None = None
        self._reader: FragmentReader | None = None
        self._key: RoundKey | None = None

    def begin(self, task: RoundTask, key: RoundKey | None) -> None:
        """Take fragments of this round from now on.

        Args:
            task: the round's.
            key: of the tokens that they have to carry, if any.
        """
        norms = norms_of(task, self._settings)
        self._task, self._reader, self._key = task, FragmentReader(task, norms), key
        if not isinstance(norms, HonestNorms):
            return
        if math.isinf(norms.pull):
            log.warning(
                "mechanism %s does not say how its noise is distributed: fragments of any norm count",
                task.release.mechanism.name,
            )
        else:
            log.debug("one fragment moves the mean by at most %.3g clip norms", norms.pull)

    def end(self) -> None:
        """Take no more fragments until a round begins."""
        self._task = self._reader = self._key = None

    def take(self, payloads: Sequence[bytes]) -> None:
        """Count each valid fragment exactly once, and send receipts."""
        began_at = self._clock.monotonic()
        opened: list[OpenedFragment] = []
        rejected: Counter[str] = Counter()
        for payload in payloads:
            try:
                opened.append(self.read(payload))
            except MessageError as error:
                log.debug("rejected a fragment: %s", error)
                rejected[error.reason] += 1
        # One line per batch and reason: a flood of invalid messages must not flood the log.
        for reason, count in rejected.items():
            log.warning(
                "rejected %s: %s", counted(count, "message"), reason,
                extra=about(event=Event.REJECTED, count=count, reason=reason),
            )  # fmt: skip
            self._store.reject(reason, count)
        if not opened or self._task is None:
            return
        result = self._store.count(
            opened,
            self._task.plan.round,
            seats=self._settings.seats,
            keeps_values=self._settings.keeps_values,
        )
        if result.unseated:
            log.warning(
                "rejected %s: %s. More came than from the %s that are expected",
                counted(result.unseated, "message"), BLOCK_FULL, counted(self._settings.devices, "device"),
                extra=about(event=Event.REJECTED, count=result.unseated, reason=BLOCK_FULL),
            )  # fmt: skip
        if result.spent:
            log.warning(
                "rejected %s: %s", counted(result.spent, "message"), SPENT,
                extra=about(event=Event.REJECTED, count=result.spent, reason=SPENT),
            )  # fmt: skip
        if result.late:
            log.info("%s arrived after the round closed", counted(result.late, "fragment"))
        self._acknowledge(result.receipted, self._task.plan.receipts, began_at)

    def read(self, payload: bytes) -> OpenedFragment:
        """Open and check a fragment.

        Raises:
            MessageError: It is not a valid fragment of this job.
        """
        fragment = self._opener.open(payload, self._job)
        task, reader, now = self._task, self._reader, self._clock.unix()
        if task is None or reader is None:
            raise MessageError("no open round", f"a fragment of round {fragment.round}")
        plan = task.plan
        if fragment.round > plan.round:
            raise MessageError("wrong round", f"{fragment.round} while round {plan.round} is open")
        token, has_tokens = b"", plan.linkability != "none"
        if has_tokens:
            token, fragment = without_token(fragment)
        dummy, probe = fragment.dummy, fragment.probe
        if fragment.round < plan.round:
            # Too late to count, so its size does not matter.
            return OpenedFragment(fragment.id, fragment.round, 0, NO_VALUES, now, probe=probe)
        if dummy or probe:
            reader.require_place(fragment)
            values = NO_VALUES
        else:
            if has_tokens:
                self._require_token(token, fragment)
            values = reader.values(fragment)
        return OpenedFragment(
            fragment.id, fragment.round, fragment.position, values, now, dummy, probe, fragment.payload
        )

    def _require_token(self, token: bytes, fragment: Fragment) -> None:
        """Refuse a fragment that no member has a token for.

        Raises:
            MessageError: It has none, or one of another round, block, job or fleet; or its id is another.
        """
        assert self._key is not None
        if fragment.id != token_id(token, fragment.position) or not self._key.is_valid(
            token, fragment.position
        ):
            raise MessageError(
                "bad token", f"no member's, for block {fragment.position} of round {fragment.round}"
            )
