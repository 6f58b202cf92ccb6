"""Mutated messages for every decoder of the wire: ``python -m tests.fuzz --inputs 10000000 --seed 1``.

The corpus is the test vectors of docs/protocol. An input is one of their messages, changed in a few random
places: as bytes, or as the values that the bytes stand for (numbers at the ends of their ranges, missing and
strange keys, lists too long, another type), nested encodings included. It goes to one decoder. A *finding* is
any error but the documented ones, more than :data:`MOST_CPU_S` of CPU time, or more memory than
:data:`MOST_MEMORY`.

Input n of a seed is always the same, so that ``--first N --inputs 1`` repeats a finding.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import cbor2
import numpy as np

from dpagent.errors import ConfigurationError, ParameterError, PlanError
from dpagent.learning.models.description import from_description
from dpagent.protocol.chunks import Assembler
from dpagent.protocol.codec import MessageError, decode, encode, read_cbor
from dpagent.protocol.fragments import read_block, read_tally
from dpagent.protocol.messages import Fragment, Layout, ModelChunk, Plan, Receipts, Sealed, Signed
from dpagent.protocol.mixing import OuterOpener
from dpagent.protocol.noisy_sum import NoisySum
from dpagent.protocol.packing import unpack
from dpagent.protocol.reports import Reports
from dpagent.protocol.sealing import Opener, seal
from dpagent.protocol.signing import Signer, Verifier
from dpagent.protocol.sizes import Precision
from dpagent.protocol.task import RoundTask
from dpagent.protocol.terms import Message
from dpagent.protocol.updates import Updates
from dpagent.protocol.weights import weights_from_bytes

MOST_CPU_S: Final = 10.0
MOST_MEMORY: Final = 1 << 30
"""Bytes of address space for one input, beyond those that the program has at its start."""
_VECTORS: Final = Path(__file__).parents[1] / "docs/protocol/vectors"
_INTEGERS: Final = (-1, 0, 1, 2, 7, 255, 256, 65_535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**64))
_FLOATS: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, 5e-324, 2.3e-308, 4e-309, 1e-16, 1e-6, 1e16, 1.7e308, -1.7e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
_OTHERS: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    "",
    "x" * 300,
    "\u2028",
    b"",
    bytes(64),
    [],
    {},
    1,
    -0.5,
)
_LONG: Final = 20_000
"""A value so long is not made longer, for the sake of this program's own memory."""
_LONGEST: Final = 100_000
_DOCUMENTED: Final = (MessageError, PlanError, ParameterError, ConfigurationError)

Decoder = Callable[[bytes, random.Random], object]


def _vectors(name: str) -> Any:
    return json.loads((_VECTORS / f"{name}.json").read_text(encoding="utf-8"))


_FLEET: Final = _vectors("fleet")
_NAME: Final[str] = _FLEET["fleet"]
_SIGNER: Final = Signer(bytes.fromhex(_FLEET["signing_secret"]), _NAME)
_VERIFIER: Final = Verifier(_SIGNER.public_key, _NAME)
_OPENER: Final = Opener(bytes.fromhex(_FLEET["sealing_secret"]), _NAME)
_OUTER: Final = OuterOpener(bytes.fromhex(_FLEET["sealing_secret"]), _NAME)


def _messages(name: str, key: str) -> list[bytes]:
    return [bytes.fromhex(vector[key]) for vector in _vectors(name)["vectors"] if key in vector]


def _payloads(name: str) -> list[bytes]:
    return [bytes.fromhex(each["payload"]) for each in _vectors(name)["payloads"]]


_REPORTS: Final = _messages("reports", "bytes")
_UPDATES: Final = [
    *_messages("clipped", "bytes"),
    *_messages("counted", "bytes"),
    *_messages("noisy", "bytes"),
]
_SUMS: Final = _messages("plan", "bytes")
_PLANS: Final = [*_SUMS, *_REPORTS, *_UPDATES]
_CHUNKS: Final = _messages("model", "bytes")
_RECEIPTS: Final = _messages("receipts", "bytes")
_MIXED: Final = [data[:1] + bytes(32) + data[1:] for data in _messages("fragment", "envelope")]
"""With the place of a plan's digest; sealing to the mixer would not give the same twice."""
_FRAGMENTS: Final = _messages("fragment", "bytes")
_TERMS: Final = [decode(plan, Plan) for plan in _PLANS]
_LOCAL_TASKS: Final = [RoundTask.of(decode(plan, Plan)) for plan in (*_REPORTS, *_UPDATES)]
_DESCRIPTIONS: Final = [plan.model.description for plan in _TERMS]


# --- decoders --------------------------------------------------------------------------------------


def _decoder(schema: type[Message | Layout]) -> Decoder:
    return lambda data, _: decode(data, schema)


def _open_signed(data: bytes, _: random.Random) -> None:
    _VERIFIER.open(data, Plan, "plan")


def _sign_and_open(data: bytes, _: random.Random) -> None:
    """A body that the coordinator signed is no safer than another."""
    body = data[:50_000]
    signature = _SIGNER._key.sign(f"dpagent v1 plan {_NAME}\0".encode() + body)
    _VERIFIER.open(encode(Signed(signature, body)), Plan, "plan")


def _open_sealed(data: bytes, _: random.Random) -> None:
    _OPENER.open(data, _TERMS[0].job)


def _seal_and_open(data: bytes, _: random.Random) -> None:
    """Anybody can seal anything."""
    _OPENER.open(seal(data[:50_000], _TERMS[0]), _TERMS[0].job)


def _open_mixed(data: bytes, _: random.Random) -> None:
    _OUTER.open(data)


def _read_block(data: bytes, random_: random.Random) -> None:
    plan = decode(random_.choice(_SUMS), Plan)
    read_block(decode(data, Fragment), plan.wire, random_.choice((1, 2, 10**6)))


def _read_by_task(data: bytes, random_: random.Random) -> None:
    """A payload, mostly of the right length, as a coordinator reads those of devices that train locally."""
    task = random_.choice(_LOCAL_TASKS)
    plan, size = task.plan, task.plan.wire.bytes
    payload = data[:size].ljust(size, b"\0") if random_.random() < 0.9 else data
    assert not isinstance(task.release, NoisySum)
    fragment = Fragment(plan.round, random_.randint(0, task.release.blocks), bytes(16), payload)
    match task.release:
        case Reports(terms=terms, blocks=blocks):
            assert (read_tally(fragment, plan, terms, blocks) >= 0).all()
        case Updates() as release:
            values = release.read(fragment)
            assert abs(values).max(initial=0) <= release.terms.largest


def _unpack(data: bytes, random_: random.Random) -> None:
    try:
        unpack(data, random_.choice((1, 4, 1_000, 10**5)), len(data))
    except ValueError as error:
        raise MessageError("bad values", str(error)) from error


def _assemble(data: bytes, random_: random.Random) -> None:
    assembler = Assembler()
    for _ in range(random_.randint(1, 4)):
        step = random_.random()
        if step < 0.3:
            assembler.keep_for(random_.choice(_TERMS))
        chunk = decode(data if step < 0.7 else random_.choice(_CHUNKS), ModelChunk)
        assembler.add(chunk)
        assembler.get(chunk.digest, random_.choice((1, len(chunk.data), 4 * 10**7, 2 * 10**8)))


def _describe(data: bytes, _: random.Random) -> None:
    from_description(read_cbor(data))


def _weights(data: bytes, _: random.Random) -> None:
    precision: Precision = "int8" if len(data) % 2 else "float32"
    parameters = len(data) // 4 if precision == "float32" else len(data) * 64 // 66
    try:
        weights_from_bytes(data, parameters, precision)
    except ValueError as error:
        raise MessageError("malformed", str(error)) from error


def _derive(data: bytes, random_: random.Random) -> None:
    """A task, from a plan whose digest is right half of the time: more than the digest is to be refused."""
    plan = decode(data, Plan)
    if random_.random() < 0.5:
        spec = from_description(read_cbor(plan.model.description))
        terms = plan.model.with_values(
            {"architecture": spec.digest(), "parameters": min(spec.parameter_count, 5 * 10**7)}
        )
        plan = plan.with_values({"model": terms})
    task = RoundTask.of(plan)
    _ = (task.release.events, task.schedule_digest, task.release.blocks)
    if task.spec.parameter_count <= _LONG:
        weights = np.frombuffer(random_.randbytes(4 * task.spec.parameter_count), np.float32)
        task.release.require_derived(np.where(np.isfinite(weights), weights, np.float32(0)))
    if isinstance(task.release, NoisySum):
        _ = (task.release.device_cap, task.release.coordinator_cap, task.release.wire_unit)


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder, its corpus, and how often it is chosen."""

    decoder: Decoder
    corpus: list[bytes]
    weight: int = 10


TARGETS: Final = {
    "decode Plan": Target(_decoder(Plan), _PLANS, 20),
    "decode ModelChunk": Target(_decoder(ModelChunk), _CHUNKS),
    "decode Fragment": Target(_decoder(Fragment), _FRAGMENTS),
    "decode Receipts": Target(_decoder(Receipts), _RECEIPTS),
    "decode Signed": Target(_decoder(Signed), _messages("plan", "envelope")),
    "decode Sealed": Target(_decoder(Sealed), _messages("fragment", "envelope")),
    "open signed": Target(_open_signed, _messages("plan", "envelope"), 3),
    "open what is signed": Target(_sign_and_open, _PLANS, 3),
    "open sealed": Target(_open_sealed, _messages("fragment", "envelope"), 3),
    "open for the mixer": Target(_open_mixed, _MIXED, 3),
    "open what is sealed": Target(_seal_and_open, _FRAGMENTS, 3),
    "read_block": Target(_read_block, _FRAGMENTS),
    "read_tally, Updates.read": Target(
        _read_by_task, [*_payloads("reports"), *_payloads("clipped"), *_payloads("counted")]
    ),
    "unpack": Target(_unpack, [fragment[24:] for fragment in _FRAGMENTS], 5),
    "assemble": Target(_assemble, _CHUNKS),
    "from_description": Target(_describe, _DESCRIPTIONS, 10),
    "weights_from_bytes": Target(_weights, _CHUNKS, 2),
    "RoundTask.of": Target(_derive, _PLANS, 20),
}
_TARGET_NAMES: Final = list(TARGETS)
_WEIGHTS: Final = [target.weight for target in TARGETS.values()]


# --- mutations -------------------------------------------------------------------------------------


def _changed_bytes(data: bytes, random_: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        start = random_.randint(0, len(changed))
        end = min(len(changed), start + random_.choice((1, 1, 2, 4, 16, 256)))
        match random_.randrange(6):
            case 0 if start < len(changed):
                changed[start] ^= 1 << random_.randrange(8)
            case 1 if start < len(changed):
                changed[start] = random_.choice((0, 0x1F, 0x5F, 0x7F, 0x80, 0x9F, 0xBF, 0xC0, 0xFB, 0xFF))
            case 2:
                del changed[start:end]
            case 3:
                changed[start:start] = changed[start:end] * random_.choice((1, 1, 2, 100))
            case 4:
                changed[start:start] = random_.randbytes(random_.choice((1, 4, 9)))
            case 5:
                del changed[start:]
            case _:
                pass
    return bytes(changed)


def _another(value: Any, random_: random.Random) -> Any:
    """Another value, of the same type if that is possible, most of the time."""
    if random_.random() < 0.15 or (isinstance(value, str | bytes | list) and len(value) > _LONG):
        return random_.choice(_OTHERS)
    match value:
        case bool() | None:
            return random_.choice(_OTHERS)
        case int():
            return random_.choice((*_INTEGERS, value + 1, value - 1, -value, float(value)))
        case float():
            return random_.choice((*_FLOATS, value * 10, value / 10, -value, value * random_.random()))
        case str():
            return random_.choice((value + "x", value[:-1], value[::-1], value * 40, "\0" + value))
        case bytes():
            return _nested(value, random_)
        case list():
            many = 6_000 if value and isinstance(value[0], int | float) else 200
            grown = value + value[:1] * random_.choice((1, 2, 20, many))
            return random_.choice((grown, value[1:], value[::-1], [value], []))
        case _:
            return random_.choice(_OTHERS)


def _nested(value: bytes, random_: random.Random) -> bytes:
    """Other bytes; what is CBOR itself mostly stays so."""
    if len(value) > 8 and random_.random() < 0.7:
        return _changed_values(value, random_)[:_LONGEST]
    return random_.choice((_changed_bytes(value, random_), bytes(len(value)), b"", value * 2, value[:-1]))


def _change_one(value: Any, random_: random.Random) -> Any:
    """Change the value itself, or one inside it."""
    if isinstance(value, dict) and value and random_.random() < 0.93:
        key = random_.choice(list(value))
        choice = random_.random()
        if choice < 0.04:
            return {name: item for name, item in value.items() if name != key}
        if choice < 0.08:
            return value | {_another(key, random_) if random_.random() < 0.5 else "extra": value[key]}
        return value | {key: _change_one(value[key], random_)}
    if isinstance(value, list) and value and random_.random() < 0.7:
        place = random_.randrange(len(value))
        return [*value[:place], _change_one(value[place], random_), *value[place + 1 :]]
    return _another(value, random_)


def _changed_values(data: bytes, random_: random.Random) -> bytes:
    try:
        value = cbor2.loads(data)
        for _ in range(random_.choice((1, 1, 1, 2, 3))):
            value = _change_one(value, random_)
        return cbor2.dumps(value)
    except (cbor2.CBORError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return _changed_bytes(data, random_)  # no CBOR, or a key that no map can have


def mutated(seed: int, number: int) -> tuple[str, bytes, random.Random]:
    """Input ``number`` of a seed: the decoder's name, the input, and the chance for what else is drawn."""
    random_ = random.Random((seed << 64) + number)
    name = random_.choices(_TARGET_NAMES, _WEIGHTS)[0]
    data = random_.choice(TARGETS[name].corpus)
    change = _changed_values if random_.random() < 0.7 else _changed_bytes
    return name, change(data, random_)[:_LONGEST], random_


# --- the run ---------------------------------------------------------------------------------------


class TooLongError(Exception):
    """A decoder took more than its time."""


def _interrupt(*_: object) -> None:
    raise TooLongError(f"more than {MOST_CPU_S:g} s of CPU time")


@dataclass(slots=True)
class Outcome:
    """What became of the inputs of a run."""

    accepted: Counter[str]
    refused: Counter[str]
    findings: list[str]

    @property
    def inputs(self) -> int:
        return self.accepted.total() + self.refused.total() + len(self.findings)


def run(seed: int, first: int, inputs: int, *, until: float | None = None) -> Outcome:
    """Decode inputs ``first`` to ``first + inputs - 1``, or fewer if the time (monotonic seconds) is over."""
    outcome = Outcome(Counter(), Counter(), [])
    before = signal.signal(signal.SIGVTALRM, _interrupt)
    try:
        for number in range(first, first + inputs):
            if until is not None and time.monotonic() >= until:
                break
            name, data, random_ = mutated(seed, number)
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_S)
            try:
                TARGETS[name].decoder(data, random_)
            except _DOCUMENTED:
                outcome.refused[name] += 1
            except Exception:  # noqa: BLE001 - any other error is what is looked for
                where = f"seed {seed}, input {number}, {name}: {data[:400].hex()}"
                outcome.findings.append(f"{where}\n{traceback.format_exc(limit=-6)}")
            else:
                outcome.accepted[name] += 1
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return outcome


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> int:
    """Run, and say how it went; 1 if there are findings."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz every decoder of the wire."
    )
    parser.add_argument("--inputs", type=int, default=10_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--every", type=int, default=100_000, help="inputs between two lines of output")
    wanted = parser.parse_args()
    _limit_memory()
    done = findings = 0
    accepted: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    while done < wanted.inputs:
        outcome = run(wanted.seed, wanted.first + done, min(wanted.every, wanted.inputs - done))
        done, findings = done + outcome.inputs, findings + len(outcome.findings)
        accepted.update(outcome.accepted)
        refused.update(outcome.refused)
        for finding in outcome.findings:
            print(finding)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        print(f"{done} inputs, {findings} findings, at most {memory} MiB", flush=True)
    for name in _TARGET_NAMES:
        print(f"{name}: {accepted[name]} accepted, {refused[name]} refused")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
