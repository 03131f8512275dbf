"""FlashInfer-Bench: its Definitions of attention, served.

    python -m evoattn.integrations.flashinfer_bench DEFINITIONS SOLUTIONS

writes a Solution for each Definition in the folder DEFINITIONS (JSON files, also in folders of it) that this module
serves, and says which are left out and why. A Solution is a few lines of Python that call this module:
https://github.com/flashinfer-ai/flashinfer-bench/blob/main/flashinfer_bench/data/solution.py (0.1.2) says what its
fields mean. Log-sum-exps are to base 2 there, `[rows, heads]`.

The longest length is read from the device once a call, as FlashInfer's `plan` reads lengths."""

import json
import sys
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from evoattn.integrations.flash_attn.cache import Cache, attend_engine
from evoattn.integrations.flash_attn.columns import side_by_side
from evoattn.integrations.flash_attn.options import Options
from evoattn.integrations.flash_attn.sequences import Keys, Queries, over_rows
from evoattn.ops.call import Answer

RAGGED = ("q", "k", "v", "qo_indptr", "kv_indptr")
PAGED = ("q", "k_cache", "v_cache", "kv_indptr", "kv_indices")
LATENT = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "kv_indptr", "kv_indices")
SERVED = {"gqa_ragged": RAGGED, "gqa_paged": PAGED, "mla_paged": LATENT}
"""The function for a Definition that has all of these inputs."""
MAY_HAVE = {"sm_scale", "qo_indptr", "kv_last_page_len", "kv_len_arr"}


def gqa_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """q `[total_q, heads, head_dim]`, k and v `[total_kv, kv_heads, head_dim]`; output and log-sum-exp."""
    longest = torch.stack([(bounds[1:] - bounds[:-1]).amax() for bounds in (qo_indptr, kv_indptr)]).tolist()
    keys = Keys(kv_indptr[:-1], longest[1], bounds=kv_indptr)
    return _to_base_2(over_rows(q, k, v, Queries(qo_indptr, longest[0]), keys, _options(sm_scale, causal)))


def gqa_paged(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, sm_scale: float | None = None, causal: bool = True, **where: Tensor
) -> tuple[Tensor, Tensor]:
    """q `[total_q, heads, head_dim]`; caches `[pages, page, kv_heads, head_dim]`; `where` keys and queries lie, the
    arguments of `pages_of` say."""
    cache, queries = pages_of(k_cache, v_cache, **where)
    return _to_base_2(attend_engine(q, queries, cache, _options(sm_scale, causal)))


def mla_paged(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sm_scale: float | None = None,
    causal: bool = True,
    **where: Tensor,
) -> tuple[Tensor, Tensor]:
    """The same of latent caches `[pages, page, 512]` and `[pages, page, 64]` for the rotated part, which are not
    copied; queries are, unless they are columns of one tensor."""
    cache, queries = pages_of(kpe_cache[:, :, None], ckv_cache[:, :, None], **where)
    q = side_by_side(q_nope, q_pe)
    return _to_base_2(attend_engine(q, queries, cache.joined(), _options(sm_scale, causal)))


def pages_of(
    k: Tensor,
    v: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    qo_indptr: Tensor | None = None,
    kv_last_page_len: Tensor | None = None,
    kv_len_arr: Tensor | None = None,
) -> tuple[Cache, Queries]:
    """The pages of sequence i are `kv_indices[kv_indptr[i]:kv_indptr[i + 1]]`, the last one filled up to
    `kv_last_page_len[i]`, or all of them up to `kv_len_arr[i]`. Without `qo_indptr` each sequence has one query."""
    count, page, batch = kv_indptr[1:] - kv_indptr[:-1], k.shape[1], len(kv_indptr) - 1
    if qo_indptr is None:
        qo_indptr = torch.arange(batch + 1, dtype=torch.int32, device=kv_indptr.device)
    most, longest = torch.stack((count.amax(), (qo_indptr[1:] - qo_indptr[:-1]).amax())).tolist()
    place = kv_indptr[:-1, None] + torch.arange(max(1, most), device=kv_indptr.device)
    kv_indices = kv_indices if len(kv_indices) else kv_indices.new_zeros(1)
    table = kv_indices[place.clamp(max=len(kv_indices) - 1)].to(torch.int32)
    used = count * page if kv_len_arr is None else kv_len_arr
    if kv_last_page_len is not None:
        used = (count - 1).clamp(min=0) * page + kv_last_page_len * (count > 0)
    return Cache(k, v, batch, used.to(torch.int32), table), Queries(qo_indptr, longest)


def _options(scale: float | None, causal: bool) -> Options:
    return Options(None if scale is None else float(scale), causal, return_lse=True)


def _to_base_2(answer: Answer) -> tuple[Tensor, Tensor]:
    assert not isinstance(answer, Tensor)
    return answer[0], answer[1].transpose(0, 1) * log2(torch.e)


def solution_of(definition: dict[str, Any], hardware: str = "NVIDIA_H100") -> dict[str, Any] | str:
    """The Solution of a Definition, both as JSON has them; a sentence where none serves it."""
    name, inputs, outputs = definition["name"], list(definition["inputs"]), list(definition["outputs"])
    function = next((one for one, needed in SERVED.items() if set(needed) <= set(inputs)), "")
    if not function:
        return f"{name}: no function has its inputs ({', '.join(inputs)})."
    if unknown := set(inputs) - set(SERVED[function]) - MAY_HAVE:
        return f"{name}: {', '.join(sorted(unknown))} is not served."
    if outputs not in (["output"], ["output", "lse"]):
        return f"{name}: its outputs are {', '.join(outputs)}, not output and lse."
    causal = "causal" in name or "decode" in name
    given = ", ".join(f"{one}={one}" for one in inputs)
    call = f"bench.{function}({given}, causal={causal})"
    source = (
        "import evoattn.integrations.flashinfer_bench as bench\n\n\n"
        f"def run({', '.join(inputs)}):\n    return {call}{'' if len(outputs) == 2 else '[0]'}\n"
    )
    return {
        "name": f"evoattn_{name}",
        "definition": name,
        "author": "evoattn",
        "description": "The best kernel that evoattn knows for the call, else PyTorch's attention.",
        "spec": {
            "language": "python",
            "target_hardware": [hardware],
            "entry_point": "main.py::run",
            "dependencies": ["evoattn"],
            "destination_passing_style": False,
        },
        "sources": [{"path": "main.py", "content": source}],
    }


def main(words: list[str]) -> int:
    if len(words) != 2:
        print(__doc__)
        return 2
    source, target = map(Path, words)
    written = 0
    for path in sorted(source.rglob("*.json")):
        definition = json.loads(path.read_text(encoding="utf-8"))
        found = (
            solution_of(definition) if {"inputs", "outputs", "axes"} <= set(definition) else f"{path}: no Definition."
        )
        if isinstance(found, str):
            print(found)
            continue
        target.mkdir(parents=True, exist_ok=True)
        (target / f"{found['name']}.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        written += 1
    print(f"{written} solutions in {target}")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
