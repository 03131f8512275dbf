"""The cases keep what a family compiles for; their lengths lie beside the tiles' edges, and the interpreter's grow with
the config; in one piece of memory they are what they were."""

import dataclasses
from collections import Counter

import pytest
import torch

from evoattn.correctness.arena import Vault
from evoattn.correctness.cases import (
    begin_apart,
    beside_tiles,
    device_cases,
    keys_of_three_kernels,
    make_case,
    packed,
    proof_of,
    tensors_of,
    used_cases,
    with_small_tables,
)
from evoattn.correctness.eight_bits import quantised
from evoattn.correctness.interpreter_cases import MOST_SQUARE_KEYS, interpreter_cases
from evoattn.families.built import BuiltKernel
from evoattn.families.registry import FAMILIES
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import CompiledKernel, CompileInfo
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from tests.mutation.settings import drawn_settings
from tests.mutation.variants import serving, settings_of

NO_CODE = CompiledKernel(b"", "", CompileInfo())


def cases(mask="full", family="flash_mma", **params):
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16", mask, "bhsd")
    config = KernelConfig(family, {"BLOCK_M": 64, "BLOCK_N": 32} | params)
    return [small.problem for small in interpreter_cases(problem, config)]


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("stages, splits", [(1, 1), (3, 1), (2, 3)])
def test_every_stage_of_each_split_is_used_again(mask, stages, splits):
    many = cases(mask, STAGES=stages, SPLITS=splits)[0]
    tiles = -(-many.seqlen_k // 32)
    assert tiles >= min((2 * stages + 2) * splits, 13) and many.seqlen_k % 32
    assert many.masking.queries_to_see_all(many.seqlen_k) <= many.seqlen_q


@pytest.mark.parametrize("block_m", [16, 64, 256])
def test_two_blocks_of_rows_whole_tiles_a_part_of_one_and_two_batches(block_m):
    many, grouped, single, whole, part, *_ = cases(BLOCK_M=block_m)
    assert single.seqlen_q == 1 and single.heads > single.kv_heads > 1 and single.seqlen_k % 32
    assert grouped.batch == 2 and grouped.group_size == 2 and grouped.layout == "bshd"
    assert grouped.seqlen_q >= min(40, 2 * block_m)
    assert whole.seqlen_k == 64 and whole.seqlen_q % block_m == 0 and whole.kv_heads == 2
    assert many.seqlen_k % 32 and part.seqlen_k < 32
    assert part.seqlen_q > 2 * block_m and part.seqlen_q % block_m
    assert part.strides("q")[2] > part.strides("k")[2] and part.seqlen_k < 32


@pytest.mark.parametrize("mask", ["full", "causal_lower_right"])
def test_rows_are_heads_where_each_query_takes_a_tile(mask):
    many, grouped, single, whole, part, *_, unseen = cases(mask, "latent_wgmma")
    assert unseen.seqlen_q > unseen.seqlen_k and unseen.masking.band(unseen.seqlen_q, unseen.seqlen_k).pairs
    assert all(case.seqlen_q <= 2 for case in (many, grouped, single, whole, part))
    assert many.heads * many.seqlen_q >= 40 and grouped.batch == 2
    assert grouped.group_size * grouped.seqlen_q >= (40 if mask == "full" else 80)
    assert whole.group_size == 64 and whole.kv_heads == 2 and part.group_size * part.seqlen_q > 64


def test_queries_are_as_many_as_a_mask_asks_for():
    many, grouped, *_ = cases("causal_upper_left", "latent_wgmma", STAGES=2)
    assert 16 < many.heads < 32 * 2 < many.seqlen_k < many.seqlen_q < 110
    assert grouped.seqlen_q == 2


@pytest.mark.parametrize("splits", [1, 2])
def test_a_stage_is_used_again_in_each_split_where_each_query_is_a_tile(splits):
    many = cases("causal_upper_left", "latent_wgmma", STAGES=2, SPLITS=splits)[0]
    assert 32 * 3 * splits < many.seqlen_k < many.seqlen_q <= 210


@pytest.mark.parametrize("tile, stages, splits", [(64, 2, 4), (32, 4, 8), (16, 2, 64), (128, 3, 6)])
def test_the_first_split_has_several_tiles_where_queries_see_few(tile, stages, splits):
    """That each split has several would be too many queries."""
    many = cases("causal_upper_left", "latent_wgmma", BLOCK_N=tile, STAGES=stages, SPLITS=splits)[0]
    tiles = -(-many.seqlen_k // tile)
    of_split = -(-tiles // splits)
    assert 1 < of_split <= stages + 1 and of_split * tile < many.seqlen_q <= 300 and many.seqlen_k % tile
    assert -(-tiles // of_split) * many.seqlen_q <= 1300


def test_few_blocks_are_more_than_several_tiles_of_a_split():
    many = cases("causal_upper_left", "latent_wgmma", BLOCK_N=128, STAGES=2, SPLITS=64)[0]
    assert many.seqlen_k < many.seqlen_q < 280


@pytest.mark.parametrize("turn", [4, 8, 16])
def test_there_are_more_heads_than_take_turns(turn):
    single = cases(TILE_ORDER=f"heads_{turn}")[2]
    assert single.seqlen_q == 1 and single.heads * single.batch > turn and single.heads % turn and turn % single.heads


def test_a_lazy_shift_has_to_rise_after_the_first_tiles():
    late = cases(RESCALE="lazy_5", STAGES=2)[6]
    assert late.seqlen_k > 4 * 32 and late.seqlen_q >= 64


def test_a_lazy_shift_rises_in_a_whole_tile_of_few_keys_where_the_mask_ends_in_the_lower_right_corner():
    late = cases("causal_lower_right", RESCALE="lazy", BLOCK_N=16, STAGES=1)[6]
    assert late.seqlen_k - late.seqlen_q > 3 * 16


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("seqused", ["", "1:4096"])
def test_a_maximum_rises_in_a_whole_tile(mask, seqused):
    """The first row of the last tile of 64 rows sees two whole tiles of keys, and there are some of a third."""
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16", mask, seqused=seqused)
    config = KernelConfig("flash_mma", {"BLOCK_M": 64, "BLOCK_N": 32, "RESCALE": "vote"})
    alike = mask == "full" and not seqused  # where the case of two batches is it
    rises = interpreter_cases(problem, config)[1 if alike else 6]
    assert rises.kind == "large_logits_two_keys"
    rises = rises.problem
    first = (rises.seqlen_q - 1) // 64 * 64
    assert set(rises.key_lengths) == {rises.seqlen_k} and rises.seqlen_k % 32
    assert len(rises.masking.band(rises.seqlen_q, rises.seqlen_k).keys(first, first + 1)) > 2 * 32


@pytest.mark.parametrize("tile, stages, split", [(128, 2, 2), (112, 1, 6), (80, 3, 6), (64, 2, 8)])
def test_a_stage_is_used_again_where_blocks_share_keys_by_turns_under_a_mask(tile, stages, split):
    many = cases("causal_upper_left", "flash_wgmma", BLOCK_N=tile, STAGES=stages, KEY_SPLIT=split)[0]
    assert stages * split * tile < many.seqlen_k < many.seqlen_q < 1600


@pytest.mark.parametrize("page", [16, 64])
def test_keys_in_use_may_end_with_a_table_of_pages(page):
    paged = AttentionProblem(2, 2, 1, 1, 4096, 64, seqused="1:4096", page=page)
    whole = {name: case for name, case, _ in used_cases(paged, 80)}["sequences of all keys"]
    assert set(whole.key_lengths) == {whole.seqlen_k} and whole.seqlen_k % page == 0


@pytest.mark.parametrize("block_n", [16, 64, 128])
def test_keys_end_far_within_a_tile_too(block_n):
    low = cases(BLOCK_N=block_n)[5]
    assert block_n * 3 / 4 < low.seqlen_k - block_n < block_n


def test_there_may_be_one_key():
    assert cases()[-1].seqlen_k == 1 and cases()[-1].seqlen_q == 2


def test_rows_that_see_no_key():
    part = cases("causal_lower_right")[4]
    assert part.masking.offset(part.seqlen_q, part.seqlen_k) < 0


def test_dtype_head_dim_and_mask_stay():
    assert {(c.dtype, c.head_dim, c.mask) for c in cases("causal_upper_left")} == {("fp16", 64, "causal_upper_left")}


@pytest.mark.parametrize("block_n", [32, 128])
def test_the_last_tile_of_keys_is_a_part_that_lies_in_both_halves(block_n):
    many, grouped, _, _, part, *_ = cases(BLOCK_N=block_n)
    assert many.seqlen_k % block_n == 1 and part.seqlen_k == block_n // 2 + 1
    assert 2 * block_n < grouped.seqlen_k < 5 * block_n // 2 and grouped.seqlen_k % 2


@pytest.mark.parametrize("block_m", [64, 256])
def test_row_blocks_of_several_heads_take_turns_on_a_few_sms(block_m):
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16")
    small = interpreter_cases(problem, KernelConfig("flash_wgmma", {"BLOCK_M": block_m, "BLOCK_N": 32}))[4]
    part = small.problem
    assert part.heads > 1 and part.seqlen_q > block_m
    tiles = part.heads * -(-part.seqlen_q // block_m)
    assert small.sms and 1 < small.sms < tiles
    genes = {"BLOCK_M": block_m, "BLOCK_N": 32, "SCHEDULE": "balanced", "TILE_ORDER": "by_head", "GROUP_ROWS": True}
    cases = interpreter_cases(problem, KernelConfig("flash_wgmma", genes))
    [pairs] = [case.problem for case in cases if case.name == "gangs"]
    assert -(-pairs.group_size * pairs.seqlen_q // block_m) == 2


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("splits", [1, 8])
def test_tiles_of_keys_that_have_one_and_that_lack_one(mask, splits):
    many, _, single, *_ = cases(mask, SPLITS=splits)
    assert many.seqlen_k % 32 == 1 and single.seqlen_k % 32 == 31


@pytest.mark.parametrize("block_n", [32, 256])
def test_rows_of_a_bias_that_end_with_the_last_key(block_n):
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16", "causal_upper_left", bias="bhs")
    config = KernelConfig("flash_mma", {"BLOCK_M": 64, "BLOCK_N": block_n})
    [extreme] = [small.problem for small in interpreter_cases(problem, config) if small.kind == "extreme_terms"]
    assert extreme.seqlen_k % 8 == 0 and extreme.seqlen_k % block_n and extreme.seqlen_k > 2 * block_n


@pytest.mark.parametrize("tile", [16, 128])
def test_edges_of_a_mask_lie_one_key_beside_those_of_tiles(tile):
    rows = 64
    plain = AttentionProblem(1, 1, 1, 4096, 4096, 64, mask="causal_lower_right")
    assert not beside_tiles(plain.with_(mask="full"), rows, tile)
    [last] = beside_tiles(plain.with_(mask="causal_upper_left"), rows, tile)
    assert last.seqlen_q % tile == 1 and last.seqlen_q > rows and last.seqlen_k > last.seqlen_q
    for mask in ("full", "causal_upper_left", "causal_lower_right"):
        for problem in [plain.with_(mask=mask, window="9:0")] + ([plain] if mask == plain.mask else []):
            bands = [p.masking.band(p.seqlen_q, p.seqlen_k) for p in beside_tiles(problem, rows, tile)]
            edges = [(band.lowest, band.highest) for band in bands]
            begins, ends = ({None if edge is None else edge % tile for edge in side} for side in zip(*edges))
            assert begins == ({1, 2, tile - 1} if problem.window else {None})
            assert ends == ({0} if mask == "causal_upper_left" else {tile - 2, tile - 1, 1})


@pytest.mark.parametrize("mask", ["full", "causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize(("tile", "split"), [(64, 2), (112, 2), (64, 6), (48, 3)])
def test_the_first_rows_see_no_key_of_a_block_that_shares_keys(mask, tile, split):
    rows, problem = 128, AttentionProblem(1, 1, 1, 4096, 4096, 64, mask=mask, window="9:0")
    _, apart = begin_apart(problem, rows, tile, split)
    band = apart.masking.band(apart.seqlen_q, apart.seqlen_k)

    def tiles_of(first_row: int, end_row: int) -> set[int]:
        return {key // tile for key in band.keys(first_row, end_row)}

    blocks = [(tiles_of(row, row + 64), tiles_of(row, row + rows)) for row in range(0, apart.seqlen_q, rows)]
    assert any(
        later >= split and later % split not in {other % split for other in first}
        for first, every in blocks
        for later in every - first
    )


def test_problems_without_a_window_and_blocks_that_share_no_keys_have_no_such_case():
    plain = AttentionProblem(1, 1, 1, 4096, 4096, 64, mask="causal_upper_left")
    assert not begin_apart(plain, 128, 64, 2)
    assert len(begin_apart(plain.with_(window="9:0"), 128, 64, 1)) == 1


@pytest.mark.parametrize("mask", ["full", "causal_upper_left"])
def test_the_largest_tiles_of_keys_are_still_used_three_times(mask):
    many = cases(mask, BLOCK_N=512)[0]
    assert many.seqlen_k > 2 * 512 and many.seqlen_k % 512


@pytest.mark.parametrize("mask", ["full", "causal_lower_right"])
@pytest.mark.parametrize("layout, other", [("bhsd", "bshd"), ("bshd", "bhsd")])
def test_the_ladder_of_the_device(mask, layout, other):
    problem = AttentionProblem(3, 8, 2, 4096, 4096, 128, "bf16", mask, layout, lse=True)
    ladder = device_cases(problem)
    small = [case for _, case, _ in ladder]
    assert {(c.dtype, c.head_dim, c.mask, c.lse) for c in small} == {("bf16", 128, mask, True)}
    assert len({name for name, _, _ in ladder}) == len(ladder)
    assert {kind for _, _, kind in ladder} == {"plain", "large_logits", "late_huge_key", "rising_maximum", "equal_keys"}
    ragged, strided, one_query, one_key, *others = small
    assert (ragged.batch, ragged.heads, ragged.kv_heads) == (2, 4, 2)
    assert {(c.batch, c.heads, c.kv_heads) for c in small[1:]} == {(1, 2, 1)}
    assert [c.layout for c in small] == [layout, other, *[layout] * (len(small) - 2)]
    assert strided.seqlen_q > strided.seqlen_k and one_query.seqlen_q == one_key.seqlen_k == 1
    assert all(c.seqlen_q < c.seqlen_k for c in (ragged, *others))


def test_the_ladder_s_lengths_lie_on_both_sides_of_the_tiles_edges():
    """Those of the plain cases are odd, so that no two rows or keys go together."""
    ladder = device_cases(AttentionProblem(1, 1, 1, 64, 64, 64))
    rows, keys = ({length for _, c, _ in ladder for length in [getattr(c, n)]} for n in ("seqlen_q", "seqlen_k"))
    assert not any(length % 16 == 0 for length in rows | keys)
    assert all(c.seqlen_q % 2 and c.seqlen_k % 2 for _, c, kind in ladder if kind == "plain")
    for lengths in (rows, keys):
        assert {1, 63} <= {length % 64 for length in lengths - {1}}


def test_far_rows_have_batches_and_several_kv_heads():
    problem = AttentionProblem(2, 8, 2, 4096, 4096, 64, "fp16")
    config = KernelConfig("flash_mma", {"BLOCK_M": 64, "BLOCK_N": 32})
    far = [small.problem for small in interpreter_cases(problem, config) if small.far]
    assert max(p.batch for p in far) > 1 and max(p.kv_heads for p in far) > 1


@pytest.mark.parametrize("softmax, tiles", [("tiles", 17), ("tiles_late", 17), ("rewrite", 6)])
def test_maxima_of_tiles_are_merged_in_several_rounds(softmax, tiles):
    genes = {"THREADS_PER_ROW": 1, "VECTOR_WIDTH": 4, "KEPT_VECTORS": 1, "PV_STAGES": 2, "PV_BLOCK_K": 32}
    config = KernelConfig("three_kernel", genes | {"TILES_A_BLOCK": 1, "BLOCK_N": 64, "WARPS_N": 2, "SOFTMAX": softmax})
    assert keys_of_three_kernels(config) == tiles * 32 - 31


def test_packed_cases_hold_the_same_and_any_change_is_seen():
    problem = AttentionProblem(1, 4, 2, 96, 96, 16, lse=True)
    cases = [make_case(name, case, 1, "cpu", kind) for name, case, kind in device_cases(problem)[:3]]
    behind = {name: torch.cat((one[:1], one))[1:] for name, one in cases[0].tensors.items()}  # rows within others
    cases[0] = dataclasses.replace(cases[0], tensors=behind)
    moved, memory = packed(cases)
    for before, after in zip(cases, moved, strict=True):
        assert (before.name, before.problem, before.answer["o"].allowed_error) == (
            after.name,
            after.problem,
            after.answer["o"].allowed_error,
        )
        for one, other in zip(tensors_of(before), tensors_of(after), strict=True):
            assert torch.equal(one, other) and one.stride() == other.stride() and one.dtype == other.dtype
    vault = Vault([memory])
    for case in moved:
        for tensor in tensors_of(case):
            kept = tensor[0, 0, 0].clone()
            tensor[0, 0, 0] += 1
            assert not vault.intact()
            tensor[0, 0, 0] = kept
            assert vault.intact()


def test_large_tables_are_cut_where_they_are_longest():
    """To 2^18 elements, by halves that are rounded up; those that have as many stay."""
    plain = parse_shape("B=1,H=4,S=64,D=64,dtype=fp16,mask=full")
    problem = plain.with_(score="s+a[h,q,k]+t[h]", tables="a:fp32:4x4x4+t:fp32:4")
    for given, kept in (("4x256x256", "4x256x256"), ("4x257x256", "4x129x256"), ("4x1001x900", "4x251x225")):
        cut = with_small_tables(problem.with_(tables=f"a:fp32:{given}+t:fp32:4"))
        assert cut.tables == f"a:fp32:{kept}+t:fp32:4"
    assert with_small_tables(plain) is plain


def test_some_scales_of_extremes_are_zero_and_neighbours_differ():
    values = torch.randn(1, 4, 1000, 32)
    third = torch.arange(1000) % 3 == 2
    zeros = {"head": (slice(1, None, 2), slice(None)), "token": (slice(None), third)}
    zeros["block"] = slice(None), torch.arange(1000) // 128 % 3 == 1
    for scales, (heads, rows) in zeros.items():
        eight = {"kv": "e4m3"} if scales == "token" else {"dtype": "e4m3"}
        problem = parse_shape("B=1,H=4,S=1000,D=32,dtype=bf16,mask=full").with_(scales=scales, **eight)
        _, scale = quantised(problem, "k", values, extreme=True)
        scale = scale.expand(1, 4, 1000, 1)
        assert not scale[:, heads][:, :, rows].any() and scale.bool().float().mean() >= 0.5


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["", "block lists", "expression"])
def test_every_launch_has_a_third_block_along_x_in_some_case(variant):
    """A kernel that leaves out the third one, or what it alone has to do, is seen by it."""
    for family in serving(variant) if variant else sorted(FAMILIES):
        drawn = settings_of(family, variant, 2, 5) if variant else drawn_settings(family, 1, 5)
        for setting in drawn:
            kernel = BuiltKernel(FAMILIES[family], setting.config, GPUS[setting.gpu], NO_CODE)
            most = Counter[str]()
            for case in proof_of(setting.problem).interpreter_cases(setting.problem, setting.config):
                for launch in case.placed(kernel).launches(case.problem):
                    most[launch.kernel] = max(most[launch.kernel], launch.grid[0])
            params = setting.config.params
            if 2 * int(params.get("TILES_A_BLOCK", 0)) * int(params.get("BLOCK_N", 0)) >= MOST_SQUARE_KEYS:
                del most["three_kernel_scores"]  # its third block would have more keys than a square case
            assert min(most.values()) >= 3, (str(setting), most)
