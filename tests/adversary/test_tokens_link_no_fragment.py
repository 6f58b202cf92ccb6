"""The coordinator knows who asked for tokens, and opens every fragment: whose is the one that I read?

Claim: with ``linkability: fragment``, all that coordinator, registry and a passive subscriber see tells no
    sender of a fragment, and not which fragments are of one device: blinded messages, signatures, tokens,
    ids, their order; the times and order of requests, answers and fragments; sizes, and ranges of values.
Parameters: digits, 20 boards, 4 fragments, 2 rounds; real requests, issuing, registry, training, spool and
    seals, on clocks that stand still between steps of 20 ms. A grid of 50 ms, a jitter window of 2 s: where
    the window is no longer than the grid's period, times say more (``docs/threat-model.md``). The adversary
    knows whose each probe is, as one does who chooses receipts. In the second round it has learned from the
    first, of which it is told all senders.

Power: each attack is compared with 2,000 random choices of senders within each block, and fails by chance
    once in 10⁶ (4.9 standard deviations). The same attacks find every sender without blinding, every pair
    with ``linkability: round``, and pairs without jitter.

Outcome: no better than chance. Printed with its interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from devices import SIGNER, Device, open_device
from fleets import make_plan
from numpy.typing import NDArray
from token_desks import JOB, Desk

from agent import tokens as agent_tokens
from agent.identity import Identity
from dpagent.protocol.blind_signatures import PREFIX_BYTES, blind, exponent
from dpagent.protocol.issuing import Ask
from dpagent.protocol.messages import Plan
from dpagent.protocol.packing import unpack
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.tokens import RoundKey, without_token

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]

BOARDS, BLOCKS, JITTER_S = 20, 4, 2.0
WORST_Z = 4.9
"""Standard deviations that chance exceeds once in 10⁶."""
DRAWS = 2_000
OPENER = Opener(new_sealing_secret(), "testers")


@dataclass(frozen=True)
class Seen:
    """A fragment as the coordinator sees it."""

    sender: int
    """In truth."""
    at: float
    block: int
    token: bytes
    spread: float
    """Of its values."""


@dataclass(frozen=True)
class Asked:
    """A request as the coordinator sees it."""

    at: float
    ask: Ask


@dataclass
class Round:
    """All that is seen of a round."""

    key: RoundKey
    asked: dict[int, Asked]
    """By board."""
    probed: dict[int, float]
    """When the probe of each board came first."""
    fragments: list[Seen]


def plan(number: int, **changes: Any) -> Plan:
    return make_plan(
        round=number, linkability=changes.pop("linkability", "fragment"), wire={"block": 2_500},
        sealing_key=OPENER.public_key, jitter_window_s=changes.pop("jitter_s", JITTER_S), **changes,
    )  # fmt: skip


def run(
    directory: Path, *, rounds: int = 1, linkability: Any = "fragment", jitter_s: float = JITTER_S
) -> list[Round]:
    """Rounds of 20 boards, and what is seen of each."""
    desk = Desk(
        directory / "members", SIGNER, tokens=1 if linkability == "round" else BLOCKS, rounds=rounds,
        linkability=linkability,
    )  # fmt: skip
    limits = {"linkability": [linkability]}
    seen, began_at = [], 1_000.0
    with ExitStack() as held:
        held.callback(desk.close)
        boards: list[tuple[Device, Identity]] = []
        for number in range(BOARDS):
            identity = desk.member()
            device = held.enter_context(
                open_device(directory / str(number), identity=identity, limits=limits)
            )
            device.tokens.watch.take_keys(desk.signed_keys)
            device.give()
            boards.append((device, identity))
        asked: dict[tuple[int, int], Asked] = {}
        for number in range(1, rounds + 1):
            fragments: list[Seen] = []
            probed: dict[int, float] = {}
            for device, _ in boards:
                device.take_plan(plan(number, linkability=linkability, jitter_s=jitter_s))
            waiting = [0.002] * 60 + [0.5] * 19 if number == 1 else []
            step_s = 0.02 if jitter_s else 0.004
            for passes_s in [*waiting, *([step_s] * round((jitter_s + 1.8) / step_s))]:
                for sender, (device, identity) in enumerate(boards):
                    step(device, identity, sender, passes_s, desk, asked, probed, fragments)
            assert len(probed) == BOARDS
            assert len(fragments) == BOARDS * BLOCKS
            began_at = boards[0][0].clock.monotonic()
            mine = {sender: each for (at, sender), each in asked.items() if at == number}
            assert len(mine) == BOARDS
            seen.append(Round(desk.round_key(number), mine, probed, fragments))
    assert began_at > 1_000.0
    return seen


def step(
    device: Device, identity: Identity, sender: int, passes_s: float, desk: Desk,
    asked: dict[tuple[int, int], Asked], probed: dict[int, float], fragments: list[Seen],
) -> None:  # fmt: skip
    """Let time pass for one board, and note what leaves it."""
    line, clock = device.line, device.clock
    before = len(line.sent)
    clock.advance(passes_s)
    device.tokens.tend()
    device.cycle.advance()
    device.cycle._publisher.publish_due()
    for topic, payload in zip(line.topics[before:], line.sent[before:], strict=True):
        if topic.endswith("/ask"):
            ask = desk.opener.open(payload)
            asked.setdefault((ask.statement.round, sender), Asked(clock.monotonic(), ask))
            device.tokens.take_answer(desk.answer(identity.device_id, payload))
        elif topic.endswith("/fragments"):
            token, fragment = without_token(OPENER.open(payload, JOB))
            if fragment.probe:
                probed.setdefault(sender, clock.monotonic())
                continue
            if any(each.token == token and each.block == fragment.position for each in fragments):
                continue  # Sent again.
            values, _ = unpack(fragment.payload, 2_500, len(fragment.payload))
            fragments.append(
                Seen(sender, clock.monotonic(), fragment.position, token, float(np.sqrt((values**2).mean())))
            )


# --- attacks: each scores how likely a fragment is a board's, or two are of one

Score = Callable[[Round, Seen, int], float]


def number_of(data: bytes) -> float:
    return int.from_bytes(data[:8], "big") / 2.0**64


def features(seen: Round, fragment: Seen, board: int) -> list[float]:
    """All that there is to compare between a fragment and a board."""
    request = seen.asked[board]
    place = fragment.block if seen.key.linkability == "fragment" else 0
    blinded = request.ask.blinded[place]
    asked_at = sorted(each.at for each in seen.asked.values())
    sent_at = sorted(each.at for each in seen.fragments if each.block == fragment.block)
    values = sorted(each.ask.blinded[place] for each in seen.asked.values())
    signatures = sorted(each.token[PREFIX_BYTES:] for each in seen.fragments if each.block == fragment.block)
    nonces = sorted(each.token for each in seen.fragments if each.block == fragment.block)
    return [
        fragment.at - request.at,
        sent_at.index(fragment.at) - asked_at.index(request.at),
        signatures.index(fragment.token[PREFIX_BYTES:]) - values.index(blinded),
        nonces.index(fragment.token) - values.index(blinded),
        number_of(fragment.token) - number_of(request.ask.statement.device),
        number_of(fragment.token[PREFIX_BYTES:]) - number_of(blinded),
        number_of(fragment.token) - number_of(request.ask.statement.head),
        number_of(fragment.token) - number_of(request.ask.statement.reply_key),
        fragment.spread,
        (fragment.at % 0.05) - (request.at % 0.05),
        fragment.at - seen.probed[board],
        (fragment.at % 0.05) - (seen.probed[board] % 0.05),
        float(board),
    ]


def by_algebra(seen: Round, fragment: Seen, board: int) -> float:
    """Whether the token's signature, raised to the exponent, is what the board has sent to be signed."""
    place = fragment.block if seen.key.linkability == "fragment" else 0
    n = int.from_bytes(seen.key.modulus, "big")
    encoded = pow(int.from_bytes(fragment.token[PREFIX_BYTES:], "big"), exponent(place), n)
    return float(encoded == int.from_bytes(seen.asked[board].ask.blinded[place], "big"))


def learned(first: Round) -> Score:
    """A classifier that was shown the senders of another round."""
    from sklearn.ensemble import RandomForestClassifier

    inputs = [features(first, each, board) for each in first.fragments for board in range(BOARDS)]
    targets = [each.sender == board for each in first.fragments for board in range(BOARDS)]
    forest = RandomForestClassifier(200, min_samples_leaf=5, class_weight="balanced", random_state=0)
    forest.fit(np.array(inputs), np.array(targets))

    def score(seen: Round, fragment: Seen, board: int) -> float:
        return float(forest.predict_proba(np.array([features(seen, fragment, board)]))[0, 1])

    return score


SENDERS: dict[str, Score] = {
    "algebra": by_algebra,
    "times": lambda seen, fragment, board: -abs(features(seen, fragment, board)[1]),
    "probes": lambda seen, fragment, board: -abs(fragment.at - seen.probed[board]),
    "token order": lambda seen, fragment, board: -abs(features(seen, fragment, board)[2]),
    "nonce order": lambda seen, fragment, board: -abs(features(seen, fragment, board)[3]),
    "ids": lambda seen, fragment, board: -abs(features(seen, fragment, board)[4]),
}
PAIRS: dict[str, Callable[[Seen, Seen], float]] = {
    "one token": lambda one, other: float(one.token == other.token),
    "times": lambda one, other: -abs(one.at - other.at),
    "ranges of values": lambda one, other: -abs(one.spread - other.spread),
    "nonces": lambda one, other: -abs(number_of(one.token) - number_of(other.token)),
}


def z_of(truth: float, drawn: Sequence[float], name: str) -> float:
    mean, deviation = float(np.mean(drawn)), float(np.std(drawn)) or 1e-9
    print(f"  {name}: {truth:.2f}, by chance {mean:.2f} ± {deviation:.2f}")
    return (truth - mean) / deviation


def shuffled_senders(seen: Round, generator: np.random.Generator) -> NDArray[np.int64]:
    """Random senders of all fragments: each board has one in each block."""
    senders = np.array([each.sender for each in seen.fragments])
    blocks = np.array([each.block for each in seen.fragments])
    for block in range(BLOCKS):
        senders[blocks == block] = generator.permutation(senders[blocks == block])
    return senders


def z_of_senders(seen: Round, score: Score, name: str) -> float:
    """The score of the true senders among that of random ones: of the mean rank of the true board."""
    scores = np.array([[score(seen, each, board) for board in range(BOARDS)] for each in seen.fragments])
    ranks = scores.argsort(axis=1, kind="stable").argsort(axis=1).astype(float)
    ranks[(scores == scores[:, :1]).all(axis=1)] = (BOARDS - 1) / 2
    rows, generator = np.arange(len(seen.fragments)), np.random.default_rng(5)
    truth = ranks[rows, [each.sender for each in seen.fragments]].mean()
    drawn = [ranks[rows, shuffled_senders(seen, generator)].mean() for _ in range(DRAWS)]
    return z_of(float(truth), drawn, f"sender by {name}")


def z_of_pairs(seen: Round, score: Callable[[Seen, Seen], float], name: str) -> float:
    """The score of true pairs among that of random ones, of different blocks."""
    found = seen.fragments
    pairs = [(i, j) for i in range(len(found)) for j in range(i) if found[i].block != found[j].block]
    scores = np.array([score(found[i], found[j]) for i, j in pairs])
    ranks = scores.argsort(kind="stable").argsort() / len(scores)
    if len(set(scores)) <= 2:
        ranks = scores
    one, other = np.array(pairs).T

    def mean_of(senders: NDArray[np.int64]) -> float:
        return float(ranks[senders[one] == senders[other]].mean())

    generator = np.random.default_rng(6)
    drawn = [mean_of(shuffled_senders(seen, generator)) for _ in range(DRAWS)]
    return z_of(mean_of(np.array([each.sender for each in found])), drawn, f"pair by {name}")


def test_tokens_and_times_tell_neither_senders_nor_pairs(tmp_path: Path) -> None:
    first, second = run(tmp_path, rounds=2)
    for seen in (first, second):
        for name, score in SENDERS.items():
            assert abs(z_of_senders(seen, score, name)) < WORST_Z, name
        for name, pair in PAIRS.items():
            assert abs(z_of_pairs(seen, pair, name)) < WORST_Z, name
    assert z_of_senders(second, learned(first), "a classifier") < WORST_Z


def test_without_blinding_every_sender_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bare(key: RoundKey, place: int) -> tuple[bytes, bytes, bytes]:
        nonce = b"n" + np.random.default_rng().bytes(PREFIX_BYTES - 1)
        one = (1).to_bytes(256, "big")
        drawn = iter([np.random.default_rng().bytes(48), one])
        made = blind(key.public(place), key.message(place, nonce), entropy=lambda _: next(drawn))
        return nonce, made.message, made.inverse

    monkeypatch.setattr(agent_tokens, "_blinded", bare)
    (seen,) = run(tmp_path)
    assert all(by_algebra(seen, each, each.sender) == 1.0 for each in seen.fragments)
    assert z_of_senders(seen, by_algebra, "algebra, without blinding") > 2 * WORST_Z


def test_one_token_a_round_shows_what_belongs_together_and_not_whose_it_is(tmp_path: Path) -> None:
    (seen,) = run(tmp_path, linkability="round")
    assert z_of_pairs(seen, PAIRS["one token"], "one token, linkability round") > 2 * WORST_Z
    for name, score in SENDERS.items():
        assert abs(z_of_senders(seen, score, name)) < math.sqrt(BLOCKS) * WORST_Z, name


def test_without_jitter_times_show_what_belongs_together(tmp_path: Path) -> None:
    (seen,) = run(tmp_path, jitter_s=0.0)
    assert z_of_pairs(seen, PAIRS["times"], "times, without jitter") > 2 * WORST_Z
