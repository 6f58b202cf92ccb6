"""The MQTT topics of a fleet, ``dpagent/v1/{fleet}/…``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from dpagent.schema.limits import Limits

FLEET_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$"
"""A fleet's name is one topic level: letters, digits, ``-`` and ``_``."""

FleetName = Annotated[str, Limits(pattern=FLEET_PATTERN)]


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics of one fleet.

    Args:
        fleet: The fleet's name, matching :data:`FLEET_PATTERN`.
    """

    fleet: str

    def __post_init__(self) -> None:
        if re.fullmatch(FLEET_PATTERN, self.fleet) is None:
            raise ValueError(f"fleet is {self.fleet!r}; expected 1 to 63 letters, digits, '-' or '_'.")

    @property
    def plan(self) -> str:
        """Retained: the plan of the round that is open."""
        return f"dpagent/v1/{self.fleet}/plan"

    def model_chunk(self, index: int) -> str:
        """Retained: chunk ``index`` of the model of the round that is open."""
        return f"dpagent/v1/{self.fleet}/model/{index}"

    @property
    def model_chunks(self) -> str:
        """Filter for all chunks of the model."""
        return f"dpagent/v1/{self.fleet}/model/+"

    def asset_chunk(self, role: str, index: int) -> str:
        """Retained: chunk ``index`` of an asset that the job needs besides the weights."""
        return f"dpagent/v1/{self.fleet}/asset/{role}/{index}"

    @property
    def asset_chunks(self) -> str:
        """Filter for all chunks of all assets."""
        return f"dpagent/v1/{self.fleet}/asset/+/+"

    @property
    def fragments(self) -> str:
        """The one topic that all devices publish to."""
        return f"dpagent/v1/{self.fleet}/fragments"

    @property
    def mixer(self) -> str:
        """The one topic that all devices publish to if the plan names a mixer."""
        return f"dpagent/v1/{self.fleet}/mixer"

    @property
    def receipts(self) -> str:
        """Digests of the fragments that have been counted, for all devices."""
        return f"dpagent/v1/{self.fleet}/receipts"

    def receipt(self, place: str) -> str:
        """The receipt of one fragment, for its device; see :mod:`dpagent.protocol.receipts`."""
        return f"dpagent/v1/{self.fleet}/receipts/{place}"

    @property
    def own_receipts(self) -> str:
        """Filter for the receipts of single fragments."""
        return self.receipt("+")

    @property
    def token_keys(self) -> str:
        """Retained: the keys of tokens of the coming rounds."""
        return f"dpagent/v1/{self.fleet}/token-keys"

    def ask(self, device: str) -> str:
        """A device's requests for tokens, by its id."""
        return f"dpagent/v1/{self.fleet}/devices/{device}/ask"

    @property
    def asks(self) -> str:
        """Filter for the requests of all devices."""
        return self.ask("+")

    def answer(self, device: str) -> str:
        """The answers to a device's requests."""
        return f"dpagent/v1/{self.fleet}/devices/{device}/answer"

    @property
    def witness(self) -> str:
        """What devices have seen of the keys of tokens, in digests."""
        return f"dpagent/v1/{self.fleet}/witness"

    @property
    def evidence(self) -> str:
        """Signed lists of keys that devices have seen, where digests differ."""
        return f"dpagent/v1/{self.fleet}/witness/evidence"
