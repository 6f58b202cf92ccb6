"""An observer reads off the model whose record was in a lot that Luo, Xu and Guan's Algorithm 1 "protects".

Claim: none. The algorithm is in the product to reproduce its paper, says `guarantee: none`, and a device runs
    it only where its owner allows that. Here is why.
Parameters: 600 digits, 9,930 weights that leave with 32 bits each (`float32`), ε = 10 over 100 rounds, first
    round, 40 releases.

Power: a mechanism with the ε that the algorithm counts, 0.07, lets nobody name more than 51.8 % of them; all
    40 with probability below 10⁻¹¹.

Outcome: the observer names all.
"""

from __future__ import annotations

from benchmarks.published_attack import read_off


def test_every_record_is_named_from_one_release() -> None:
    reading = read_off(10.0, releases=40)
    assert reading.named == 1.0
    assert reading.exposed > 0.3
    assert reading.epsilon < 0.1
