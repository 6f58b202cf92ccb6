"""CONTRIBUTING.md shows the examples as they are."""

from __future__ import annotations

import re
from pathlib import Path

import cbor2
import pytest
from examples import message_field
from fleets import plan_values

from dpagent.protocol import messages
from dpagent.protocol.codec import MessageError, decode
from dpagent.protocol.signing import Signer, Verifier, new_signing_secret

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"<!-- (tests/examples/\w+\.py) -->\n\n?```python\n(.*?)```\n", re.DOTALL)


def test_the_page_shows_the_examples_as_they_are() -> None:
    shown = dict(SHOWN.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))
    examples = {
        file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8")
        for file in (ROOT / "tests" / "examples").glob("*.py")
        if file.read_text(encoding="utf-8").startswith('"""A worked example')
    }
    assert shown == examples, "run: python docs/make_contributing.py"


def test_a_field_needs_no_other_change() -> None:
    """It travels, is signed and checked; a device from before refuses the message whole."""
    signer = Signer(new_signing_secret(), "testers")
    verifier = Verifier(signer.public_key, "testers")
    values = plan_values()
    plan = message_field.Plan.checked(values | {"training_memory_mib": 48})
    message = signer.sign(plan, "plan")
    assert verifier.open(message, message_field.Plan, "plan").training_memory_mib == 48
    with pytest.raises(MessageError) as caught:
        verifier.open(message, messages.Plan, "plan")
    assert caught.value.reason == "malformed"
    for wrong in (0, 2**20 + 1, "48", 48.0, True, None):
        with pytest.raises(MessageError):
            decode(cbor2.dumps(values | {"training_memory_mib": wrong}, canonical=True), message_field.Plan)
