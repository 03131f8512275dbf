"""scripts/noise.py without a GPU: its renderer goes to the compile workers."""

import pickle
from dataclasses import replace

import noise

from evoattn.model.gpu import GPUS
from evoattn.model.space import KernelConfig


def test_all_configs_but_one_are_the_kernel_with_a_delay():
    config, gpu = KernelConfig("flash_scalar", noise.BASE), GPUS["h100"]
    base = noise.render(noise.FAMILY, noise.PROBLEM, config, gpu)
    slower = pickle.loads(pickle.dumps(noise.Delayed(base, 300, "another")))(noise.FAMILY, noise.PROBLEM, config, gpu)
    itself = noise.Delayed(base, 300, config.id)(noise.FAMILY, noise.PROBLEM, config, gpu)
    assert "clock64() - born < 300" in slower.source and config.id in slower.source
    assert replace(itself, source=base.source) == base and itself.source.startswith(base.source)
