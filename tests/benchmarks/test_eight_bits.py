"""The benchmark of what 8 bits cost a trained model."""

import pytest
import torch

from benchmarks.models import eight_bits


@pytest.mark.slow
def test_a_model_runs_in_eight_bits_and_an_outlier_changes_nothing_but_roundings():
    torch.manual_seed(0)
    model = eight_bits.Model()  # training imports torch's compiler
    shown = eight_bits.batch(1, torch.Generator().manual_seed(5))
    with torch.no_grad():
        losses = [
            model.loss(*shown, attend, outlier).item()
            for attend in (eight_bits.by_torch, eight_bits.sixteen_bits, eight_bits.fp8(True))
            for outlier in (0.0, eight_bits.OUTLIER)
        ]
    assert max(losses) - min(losses) < 0.02 * losses[0] and max(losses) > min(losses)
    plain, smooth = (eight_bits.error(eight_bits.fp8(smooth), eight_bits.OUTLIER, 200) for smooth in (False, True))
    assert 0.04 < smooth < plain < 0.08
