"""Genes of flash_wgmma that searches of several problems aim at a problem: tiles that fill the SMs, heads of a group as
rows, keys shared out among blocks."""

import math

from evoattn.families.base import Aim, Aimed, Params
from evoattn.families.flash_wgmma.resources import FEW_ROWS, FlashWgmmaGenes, launch_work, merges_in_memory

ROOMIEST = 3
"""Values of a tile's extent from which one is drawn, those that leave least idle."""


def _blocks(aim: Aim, **genes: int) -> int:
    """Blocks of the config with these genes, without a split of the keys."""
    made = FlashWgmmaGenes(**aim.params | genes | {"KEY_SPLIT": 1, "SCHEDULE": "single"})
    return launch_work(aim.problem, made, 0)[0].blocks


def split_keys(aim: Aim) -> Params:
    """As many blocks on the keys of the same rows as fit on the SMs at once, or half as many."""
    slots = aim.gpu.sm_count * aim.params["BLOCKS_PER_SM"]
    most = min(slots // _blocks(aim), math.ceil(aim.problem.seqlen_k / aim.params["BLOCK_N"]))
    splits = [s for s in aim.values("KEY_SPLIT") if 1 < s <= most]
    if not splits:
        return {}
    split = aim.rng.choice(splits[-2:])
    changed: Params = {"KEY_SPLIT": split, "SCHEDULE": "single"}
    genes = FlashWgmmaGenes(**aim.params | changed)
    return changed | ({"STORE": "rows"} if merges_in_memory(aim.problem, genes) else {})


def group_rows(aim: Aim) -> Params:
    """The query heads of a K/V head as rows of the same tiles, or no longer."""
    return {"GROUP_ROWS": not aim.params["GROUP_ROWS"]} if aim.problem.group_size > 1 else {}


def fill_waves(aim: Aim) -> Params:
    """Rows of a tile and blocks per SM that leave few SMs idle in the last wave."""
    choices = []
    for block_m in (rows for rows in aim.values("BLOCK_M") if rows != FEW_ROWS):
        for resident in aim.values("BLOCKS_PER_SM"):
            waves = math.ceil(_blocks(aim, BLOCK_M=block_m) / (aim.gpu.sm_count * resident))
            if block_m * resident <= max(aim.values("BLOCK_M")):  # whose outputs fit in the registers of an SM
                choices.append((waves * block_m * resident, aim.rng.random(), block_m, resident))
    *_, block_m, resident = aim.rng.choice(sorted(choices)[:ROOMIEST])
    genes = {"BLOCK_M": block_m, "BLOCKS_PER_SM": resident}
    return {} if genes.items() <= aim.params.items() else genes


def fit_keys(aim: Aim) -> Params:
    """Tiles of keys of which the last is nearly full, and no more stages than there are tiles."""
    padded = sorted((math.ceil(aim.problem.seqlen_k / n) * n, -n) for n in aim.values("BLOCK_N"))
    block_n = -aim.rng.choice(padded[:ROOMIEST])[1]
    if block_n == aim.params["BLOCK_N"]:
        return {}
    tiles = math.ceil(aim.problem.seqlen_k / block_n / aim.params["KEY_SPLIT"])
    return {"BLOCK_N": block_n, "STAGES": max(1, min(aim.params["STAGES"], tiles))}


AIMS: tuple[Aimed, ...] = (split_keys, group_rows, fill_waves, fit_keys)
