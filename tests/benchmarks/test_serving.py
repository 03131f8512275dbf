"""Steps of a serving engine: what is drawn, that a right answer is found right and a wrong one wrong, what is asked."""

import pytest

from benchmarks.calls.serving import MODELS, TOLERANCE, Batch, Step, draw, problems_of, report

SMALL = Step("Mistral 7B, window", 16, ((1, 40), (1, 3), (9, 9), (5, 30)), 2)


def test_batches_are_as_said():
    steps = draw(7, 40)
    assert steps == draw(7, 40) and {step.model for step in steps} == set(MODELS)
    for step in steps:
        assert all(queries == 1 for queries, _ in step.lengths[: step.decodes])
        assert all(queries <= keys for queries, keys in step.lengths)
        assert 1 <= len(step.lengths) <= 256 and len(step.lengths) - step.decodes <= 0.31 * len(step.lengths) + 1


@pytest.mark.parametrize("model", ["Mistral 7B, window", "gpt-oss, window", "DeepSeek V3, a card of 8"])
def test_an_answer_is_compared_with_float64(model):
    step = Step(model, 16, SMALL.lengths if "DeepSeek" not in model else ((1, 40), (1, 3)), 2)
    batch = Batch(step, "cpu")
    out = batch.mixed(strict=False)
    assert batch.error(out) < TOLERANCE < batch.error(out + 0.1)
    assert batch.error(out.flip(0)) > TOLERANCE


def test_what_is_asked_of_kernels():
    (asked,) = problems_of(SMALL)
    assert (asked.batch, asked.seqlen_q, asked.mask, asked.page) == (4, 9, "causal_lower_right", 16)
    row = {"said": "x", "us": {"evoattn": 2.0, "gather": 6.0}, "errors": {"evoattn": 0.001}, "why": {"fa4": "no pages"}}
    text = report([row], ("evoattn", "gather", "fa4"))
    assert "| x | 2.0 | 6.0 |  |" in text and "no pages" in text
    assert "gather over evoattn: 3.000, evoattn ahead on 1 of 1" in text
