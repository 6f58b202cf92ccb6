"""Invitation codes: read back whatever a person does to their form, and refused with any mistake in them."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpagent.protocol.enrolment import CODE_BEGINS, Invitation, hash_of, new_secret

LABELS = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
HOSTS = st.lists(LABELS, min_size=1, max_size=3).map(".".join) | st.just("2001:db8::7")
INVITATIONS = st.builds(
    Invitation, HOSTS, st.integers(1, 65_535), st.binary(min_size=16, max_size=16),
    st.binary(min_size=16, max_size=16),
)  # fmt: skip


@given(INVITATIONS, st.data())
def test_a_code_is_read_back_in_any_case_and_with_any_breaks(
    invitation: Invitation, data: st.DataObject
) -> None:
    code = invitation.code()
    assert set(code) <= set(string.ascii_uppercase + string.digits + "-")  # one mode of a QR code
    at = data.draw(st.integers(len(CODE_BEGINS), len(code)))
    for text in (code, code.lower(), f" {code[:at]}\n{code[at:]}\t", f"{code[:at]}-{code[at:]}"):
        assert Invitation.read(text) == invitation


@given(INVITATIONS, st.data())
def test_a_letter_that_is_wrong_or_missing_is_noticed(invitation: Invitation, data: st.DataObject) -> None:
    code = invitation.code()
    at = data.draw(st.integers(0, len(code) - 1))
    letter = data.draw(st.sampled_from(string.ascii_uppercase + string.digits + "!ä"))
    for wrong in (code[:at] + letter + code[at + 1 :], code[:at] + code[at + 1 :], code[:at]):
        try:
            read = Invitation.read(wrong)
        except ValueError:
            continue
        assert read == invitation  # bits that the last letter has to spare, or a hyphen that was none


@given(st.text() | st.text(string.ascii_uppercase + "234567").map(CODE_BEGINS.__add__))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        invitation = Invitation.read(text)
    except ValueError:
        return
    assert Invitation.read(invitation.code()) == invitation


def test_an_address_is_an_endpoint() -> None:
    secret = new_secret()
    assert Invitation("fleet.example", 99, bytes(16), secret).url == "https://fleet.example:99"
    assert Invitation("2001:db8::7", 99, bytes(16), secret).url == "https://[2001:db8::7]:99"
    assert hash_of(secret) != hash_of(new_secret())


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("a b", 1),
        ("x/../y", 1),
        ("h", 0),
        ("user@h", 1),
        ("a..b", 1),
        ("1:2", 1),
        ("x" * 64, 1),
        ("fe80::1%x", 1),
    ],
)
def test_a_code_that_names_no_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(ValueError, match="no address"):
        Invitation.read(Invitation(host, port, bytes(16), bytes(16)).code())
