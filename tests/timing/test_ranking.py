"""Who is faster, under synthetic noise: drift, outliers and heavy tails must not make a winner."""

import random
from math import comb

import pytest

from evoattn.model.records import Timing
from evoattn.timing import ranking

ROUNDS = 25


def noise(kind: str, rng: random.Random, n: int) -> float:
    """Factor on the time of round `n`, drawn anew for each contestant but for the drift, which a round shares."""
    if kind == "normal":
        return 1 + rng.gauss(0, 0.01)
    if kind == "drift":
        return (1 + 0.1 * n / ROUNDS) * (1 + rng.gauss(0, 0.002))
    if kind == "outliers":
        return 1 + rng.gauss(0, 0.003) + (2.0 if rng.random() < 0.1 else 0)
    return 1 + 0.005 * abs(rng.gauss(0, 1) / rng.gauss(0, 1))  # Cauchy: not even a mean


def final(kind: str, rng: random.Random, speeds: list[float]) -> dict[int, Timing]:
    return {
        i: Timing(tuple(10 * speed * noise(kind, rng, n) for n in range(ROUNDS)), {"stage": "final", "run": "r"})
        for i, speed in enumerate(speeds)
    }


def leader(timings: dict[int, Timing]) -> int:
    return min(timings, key=lambda n: timings[n].median_us)


KINDS = ("normal", "drift", "outliers", "heavy tail")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("contestants", [2, 8])
def test_the_same_kernel_twice_is_seldom_called_a_win(kind, contestants):
    rng, wins, repeats = random.Random(kind), 0, 300
    for _ in range(repeats):
        timings = final(kind, rng, [1.0] * contestants)
        ratios = ranking.against_leader(timings, leader(timings))
        wins += not all(r.tie for r in ratios.values())
    assert wins / repeats <= 0.09  # 5 % and the counting error of 300 repeats, three sigma


@pytest.mark.parametrize("kind", KINDS)
def test_five_per_cent_faster_is_found(kind):
    rng, found = random.Random(kind), 0
    for _ in range(100):
        timings = final(kind, rng, [1.05, 1.0, 1.05, 1.05])
        first = leader(timings)
        found += first == 1 and not any(r.tie for r in ranking.against_leader(timings, first).values())
    assert found >= 95


@pytest.mark.parametrize("kind", KINDS)
def test_the_interval_covers_the_true_ratio(kind):
    rng, covered = random.Random(kind), 0
    for _ in range(300):
        timings = final(kind, rng, [1.0, 1.02])
        ratio = ranking.compare(timings[1], timings[0])
        covered += ratio.low <= 1.02 <= ratio.high
    assert covered / 300 >= 0.91


@pytest.mark.parametrize("rounds, confidence", [(25, 0.95), (25, 0.993), (15, 0.95), (8, 0.95), (101, 0.99)])
def test_the_ranks_are_the_tightest_that_keep_the_confidence(rounds, confidence):
    low, high = ranking.interval_ranks(rounds, confidence)

    def outside(k: int) -> float:
        return 2 * sum(comb(rounds, i) for i in range(k)) / 2**rounds

    assert high == rounds - 1 - low and outside(low + 1) <= 1 - confidence < outside(low + 2)


def test_few_rounds_or_other_rounds_say_nothing():
    one = Timing((1.0,) * 5, {"run": "a"})
    assert ranking.interval_ranks(5, 0.95) is None and ranking.compare(one, one) is None
    assert ranking.compare(Timing((1.0,) * 25, {"run": "a"}), Timing((1.0,) * 25, {"run": "b"})) is None


def test_the_bounds_of_a_tie_belong_to_it():
    low, high = 1.0 - ranking.RESOLUTION, 1.0 + ranking.RESOLUTION
    assert ranking.Ratio(1.1, high, 1.2).tie and ranking.Ratio(0.9, 0.8, low).tie
    assert not ranking.Ratio(1.1, high + 1e-9, 1.2).tie and not ranking.Ratio(0.9, 0.8, low - 1e-9).tie


def test_a_tail_that_is_just_allowed_counts():
    assert ranking.interval_ranks(5, 1 - 2 / 32) == (0, 4) and ranking.interval_ranks(5, 1 - 1.9 / 32) is None


@pytest.mark.parametrize("damaged", [0.0, -0.5])
def test_a_time_that_cannot_be_gives_no_ratio(damaged):
    rival = Timing((1.0,) * 9, {"run": "r"})
    assert ranking.compare(rival, Timing((1.0,) * 8 + (damaged,), {"run": "r"})) is None
    assert ranking.compare(rival, Timing((1.0,) * 9, {"run": "r"})) == ranking.Ratio(1.0, 1.0, 1.0)


def test_the_confidence_is_shared_among_the_rivals():
    rounds = 25
    leader, rival = (Timing(s, {"run": "r"}) for s in ((1.0,) * rounds, tuple(range(1, rounds + 1))))
    for rivals in (1, 5):
        ratios = ranking.against_leader({0: leader, **dict.fromkeys(range(1, rivals + 1), rival)}, 0)
        low, high = ranking.interval_ranks(rounds, 1 - (1 - ranking.CONFIDENCE) / rivals)
        assert ratios == dict.fromkeys(range(1, rivals + 1), ranking.Ratio(13.0, low + 1, high + 1))
    assert ranking.interval_ranks(rounds, 0.99) != ranking.interval_ranks(rounds, 0.95)
