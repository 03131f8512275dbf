"""Conversions of 8-bit floats over all codes, against torch's own."""

import numpy as np
import pytest
import torch

from evoattn.ptx.isa.eight_bits import VALUES, to_code

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_has_its_value(kind):
    codes = torch.arange(256, dtype=torch.uint8).view(KINDS[kind])
    assert np.array_equal(VALUES[kind], codes.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_halfway_between_codes_go_to_the_even_one(kind):
    finite = VALUES[kind][:128][np.isfinite(VALUES[kind][:128])].astype(np.float64)
    middle = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    beside = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))])
    values = np.concatenate([beside, -beside])
    assert np.array_equal(to_code(values, kind), torch.from_numpy(values).to(KINDS[kind]).view(torch.uint8).numpy())
    limits = np.array([np.inf, -np.inf, np.nan, 1e9], np.float32)
    last = len(finite) - 1
    assert to_code(limits, kind).tolist() == [last, last | 0x80, 0x7F, last]
