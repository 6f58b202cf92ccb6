"""A broker times acknowledgements while a device trains, to learn when training ended.

Claim: how soon a device acknowledges messages in a round's slot has the same distribution whether it trained
    on 1,000 records or on 10,000.

Before, training was a thread of the program that acknowledges, and ended when the lot was done.

A device trains in a round only if a receipt has come of the one before; without, this compared devices that
wait, from the second round on.

Power: 40 rounds with each number of records, by turns; 160 probes a round. For each 50 ms of a slot the
    rounds' median latencies are compared (Kolmogorov and Smirnov), and the least p-value is corrected for as
    many looks (Bonferroni). The test fails by chance once in 1,000 runs. A shift of 0.3 ms within one look is
    found with a probability of 0.99, one of 0.2 ms of 0.88 (by resampling what was measured on a quiet
    machine of two cores). There the code of before passes, too: numpy lets go of the interpreter's lock while
    it multiplies. Run it on a quiet machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from brokers import wait_until
from children import PATIENCE_S
from fleets import DIGITS, make_plan, run_agent, terms, write_agent
from numpy.typing import NDArray
from scipy import stats
from timing_broker import TimingBroker

from dpagent.learning.data.dataset import ArrayDataset
from dpagent.learning.data.formats.npz import save_npz
from dpagent.protocol.chunks import chunked
from dpagent.protocol.messages import Receipts
from dpagent.protocol.receipts import receipt_digest
from dpagent.protocol.sealing import Opener, new_sealing_secret
from dpagent.protocol.signing import Signer, new_signing_secret
from dpagent.protocol.topics import Topics
from dpagent.protocol.weights import weights_to_bytes

ROUNDS, PROBES, EVERY_S = 40, 160, 0.005
FEW, MANY = 1_000, 10_000
SLOT_S = 1.0
LOOKS = 16
SIGNER = Signer(new_signing_secret(), "testers")
TOPICS = Topics("testers")
OPENER = Opener(new_sealing_secret(), "testers")
WEIGHTS = weights_to_bytes(DIGITS.initial_weights(0), "float32")


@contextmanager
def device(directory: Path, records: int) -> Iterator[TimingBroker]:
    """A connected agent with so many made-up records."""
    with TimingBroker() as broker:
        file = write_agent(
            directory, None, SIGNER.public_key, engine="numpy", budget={"epsilon": 900.0, "delta": 0.1},
            mqtt={"url": broker.url, "protocol": "3.1.1"}, data={"max_records": MANY},
            limits={"minimum_compute_slot_s": 0.001},
        )  # fmt: skip
        generator = np.random.default_rng(1)
        inputs = generator.random((records, 8, 8, 1), np.float32)
        save_npz(directory / "data.npz", ArrayDataset(inputs, generator.integers(0, 10, records), 10))
        with run_agent(file):
            assert broker.is_subscribed.wait(PATIENCE_S)
            yield broker


def latencies(broker: TimingBroker, number: int) -> NDArray[np.float64]:
    """Seconds until each probe of a round is acknowledged, from the plan on."""
    plan = make_plan(
        round=number, compute_slot_s=SLOT_S, jitter_window_s=0.0, sealing_key=OPENER.public_key,
        deadline=time.time() + 600, **terms(rate=1.0, noise_multipliers=[4.0] * ROUNDS),
    )  # fmt: skip
    for chunk in chunked(WEIGHTS):
        broker.publish(TOPICS.model_chunk(chunk.index), SIGNER.sign(chunk, "model"))
    time.sleep(0.05)
    seen = len(broker.published)
    sent = [broker.publish(TOPICS.plan, SIGNER.sign(plan, "plan"))]
    probe = SIGNER.sign(Receipts(b""), "receipts")
    began = time.perf_counter()
    for count in range(1, PROBES + 1):
        time.sleep(max(0.0, began + count * EVERY_S - time.perf_counter()))
        sent.append(broker.publish(TOPICS.receipts, probe))
    wait_until(lambda: all(number in broker.acknowledged for number, _ in sent), "all acknowledgements")
    fragments = -(-DIGITS.parameter_count // plan.wire.block)
    wait_until(lambda: len(broker.published) >= seen + fragments, "the answer")
    ids = [OPENER.open(each, plan.job).id for each in broker.published[seen:]]
    counted = Receipts(b"".join(map(receipt_digest, ids)))
    broker.publish(TOPICS.receipts, SIGNER.sign(counted, "receipts"))  # or it trains no more
    return np.array([broker.acknowledged[number] - left_at for number, left_at in sent[1:]])


@pytest.mark.slow
def test_acknowledgements_are_as_quick_however_many_records_there_are(tmp_path: Path) -> None:
    with ExitStack() as stack:
        few = stack.enter_context(device(tmp_path / "few", FEW))
        many = stack.enter_context(device(tmp_path / "many", MANY))
        rounds = [(latencies(few, number), latencies(many, number)) for number in range(1, ROUNDS + 1)]
    of_few, of_many = (
        np.median(np.stack(each).reshape(ROUNDS, LOOKS, -1), axis=2) for each in zip(*rounds, strict=True)
    )
    values = [stats.ks_2samp(of_few[:, look], of_many[:, look]).pvalue for look in range(LOOKS)]
    print(
        "median latency, ms:",
        np.round(1e3 * np.median(of_few, axis=0), 2),
        np.round(1e3 * np.median(of_many, axis=0), 2),
    )
    assert LOOKS * min(values) > 1e-3, values
