"""Deriving a task from a plan: the description of the model is read as strictly as the plan around it."""

from __future__ import annotations

import cbor2
import pytest
from fleets import DIGITS, make_plan

from dpagent.errors import PlanError
from dpagent.protocol.task import RoundTask

DESCRIPTION = cbor2.dumps(DIGITS.describe(), canonical=True)


def shared(depth: int) -> bytes:
    """A list that holds twice a list that holds twice …: tags 28 and 29 share each of them."""
    data = b"\xd8\x1c\x80"
    for number in range(depth, 0, -1):
        data = b"\xd8\x1c\x82" + data + b"\xd8\x1d" + cbor2.dumps(number)
    return data


@pytest.mark.parametrize(
    "description",
    [
        b"\xd9\xd9\xf7" + DESCRIPTION,
        DESCRIPTION + b"\0",
        b"\xbf" + DESCRIPTION[1:] + b"\xff",
        bytes([DESCRIPTION[0] + 1]) + DESCRIPTION[1:] + cbor2.dumps("name") + cbor2.dumps("digits"),
        # To print it would take 2¹² lists here; 200 bytes are enough for 2⁴⁰.
        DESCRIPTION.replace(cbor2.dumps("digits"), shared(12)),
    ],
    ids=["tag", "trailing byte", "indefinite length", "key twice", "shared values"],
)
def test_a_description_is_read_as_strictly_as_a_message(description: bytes) -> None:
    assert RoundTask.of(make_plan(model={"description": DESCRIPTION})).spec == DIGITS
    with pytest.raises(PlanError, match="malformed"):
        RoundTask.of(make_plan(model={"description": description}))
