"""Campaigns as `evoattn portfolio measure` writes them, made up: the kernels of flash_mma on small problems."""

import numpy as np

from evoattn.cost import measurements
from evoattn.cost.cost import physical_part
from evoattn.cost.fitted import load
from evoattn.cost.measurements import Campaign
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig, config_id

CARDS = H100, H200 = GPUS["h100"], GPUS["h200"]
PROBLEM = parse_shape("B=1,H=16,S=1024,D=64")
CONFIGS = [
    KernelConfig("flash_mma", config.params | {"BLOCK_ORDER": order})
    for config in load_space("flash_mma", H100).starting_configs()
    for order in ("rows", "heads")
]


def campaign(card, name, batches):
    """Kernels that take what the physical part says, a tenth more or less by chance; a final table of all of them."""
    rng = np.random.default_rng(len(name))
    problems = [PROBLEM.with_(batch=b) for b in batches]
    us = [[physical_part(p, c, card, 128, load()).us * rng.uniform(0.9, 1.1) for p in problems] for c in CONFIGS]
    ids = [config_id(c.family, c.params) for c in CONFIGS]
    kernels = [
        {"id": i, "family": c.family, "params": c.params, "origin": "seed", "state": "right", "registers": 128,
         "spill_bytes": 0, "times": {str(n): round(t, 3) for n, t in enumerate(times)}, "rough": []}
        for i, c, times in zip(ids, CONFIGS, us)
    ]  # fmt: skip
    final = {"kernels": ids, "us": [[times[n] * 1.01 for times in us] for n in range(len(problems))]}
    group = {"group": "16 d64 full", "problems": [p.to_dict() for p in problems], "kernels": kernels, "final": final}
    product = {"h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}[card.name]
    return Campaign(name, {"device": product, "saved": "2026-11-23"}, [group])


def kept_campaigns(folder):
    """One of each card, as the repository keeps them: their paths."""
    paths = []
    for card, batches in ((H100, range(1, 8)), (H200, range(4, 10))):
        measurements.append(folder / f"{card.name}.npz", [campaign(card, f"{card.name}-x", batches)])
        paths.append(folder / f"{card.name}.npz" / f"{card.name}-x")
    return paths
