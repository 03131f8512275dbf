"""The shipped portfolio serves problems as people have them, with kernels that can run."""

from dataclasses import replace

import pytest

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.named_problems import lookup
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import load_space
from evoattn.portfolio import shipped
from evoattn.portfolio.cover import MOST_KERNELS
from evoattn.portfolio.features import class_of
from evoattn.portfolio.kind_workload import KINDS, draw_kind
from evoattn.portfolio.known import known
from evoattn.portfolio.nearest import classes_for
from evoattn.portfolio.pick import pick, portfolio_kernels
from evoattn.portfolio.variant_workload import draw_variants
from evoattn.portfolio.wide_workload import draw_wide
from evoattn.portfolio.workload import draw

H100 = GPUS["h100"]
JUDGED = ("h100", "h200")
UNSEEN = (500, 501)
"""Seeds that no portfolio was built from."""


def source(kernel):
    params = dict(kernel.config.params)
    if params.get("MERGE") != "cluster":
        params.pop("SPLITS", None)
    return kernel.config.family, tuple(sorted(params.items()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "gpu", [H100, replace(H100, name="cut", sm_count=114), GPUS["h200"], GPUS["l4"]], ids=lambda g: g.name
)
def test_hundreds_of_problems_get_kernels_that_can_run(gpu):
    problems = [p for seed in UNSEEN for p in draw(seed, 120)]
    picks = [pick(p, gpu) for p in problems]
    for problem, found in zip(problems, picks, strict=True):
        if found:
            assert registry.lookup(found.family).why_impossible(problem, found.config, gpu) is None
            assert found.estimated == (gpu.name not in JUDGED or found.expected_regret is None)
    missing = [p.describe() for p, found in zip(problems, picks, strict=True) if found is None]
    assert len(missing) == (0 if gpu.arch == "sm_90a" else len(problems))  # the portfolio is of sm_90a


ODD = (
    "B=1,H=1,Sq=1,Sk=1,D=8",
    "B=1,H=1,Sq=1,Sk=1,D=4,dtype=fp32",
    "B=300,H=128,Hkv=1,Sq=5,Sk=1,D=264,dtype=bf16,mask=causal_lower_right",
    "B=2,H=7,Hkv=1,Sq=100000,Sk=2,D=24,window=0:0,softcap=1,sink=1,lse=1",
    "B=3,H=66,Sq=17,Sk=131072,D=40,dtype=fp32,alibi=1,seqused=0:0",
    "B=64,H=3,Sq=1,Sk=7,D=96,Dv=8,dtype=bf16,layout=bshd,seqused=1:7,page=256",
    "B=2,H=2,Sq=2,Sk=3,D=64,dtype=bf16,layout=bshd,varlen=0+2/3+0,window=4096:0",
    "B=1,H=16,Hkv=1,Sq=1,Sk=9,D=576,Dv=512,shared_kv=1,sink=1,dtype=bf16",
)


@pytest.mark.parametrize("gpu", JUDGED)
@pytest.mark.parametrize("shape", ODD)
def test_odd_shapes_get_a_kernel_that_can_run_or_none(shape, gpu):
    problem = parse_shape(shape)
    found = pick(problem, GPUS[gpu])
    if found:
        assert not registry.lookup(found.family).why_impossible(problem, found.config, GPUS[gpu])


@pytest.mark.slow
def test_thousands_of_sequences_get_a_kernel():
    assert pick(parse_shape("B=8192,H=32,Hkv=8,Sq=1,Sk=4096,D=128,dtype=bf16,seqused=1:4096"), H100)


def test_every_class_has_few_kernels():
    portfolio = shipped.load("sm_90a")
    assert portfolio
    for name in portfolio.classes:
        made = portfolio.kernel_class(name)
        assert 1 <= len(made.kernels) <= MOST_KERNELS, name
        assert len({source(k) for k in made.kernels}) == len(made.kernels), name
        assert 1.0 <= made.regret <= made.worst
        assert all(c >= 0 for k in made.kernels for c in k.constants) and all(k.resident >= 1 for k in made.kernels)
        assert all(k.errors.shape == (len(k.variants()), len(made.points)) for k in made.kernels)


def test_a_file_is_read_group_by_group(tmp_path):
    config = load_space("flash_wgmma", H100).starting_configs()[0]
    older = {name: value for name, value in config.params.items() if name != "GROUP_ROWS"}
    kernel = {"family": "flash_wgmma", "params": older, "resident": 2, "constants": [1.5], "errors": [[0.1]]}
    classes = {"few": {"kernels": [1], "regret": 1.0, "worst": 1.2, "problems": 9}}
    row = {"points": [[1.0, 2.0]], "kernels": [kernel, kernel | {"resident": 3}], "classes": classes}
    shipped.save(tmp_path / "sm_80.jsonl", ["a100"], [{"device": "A100"}], {"first": row, "second": row})
    text = (tmp_path / "sm_80.jsonl").read_text()
    (tmp_path / "sm_80.jsonl").write_text(text[: text.rindex('{"points')] + "damaged\n")
    portfolio = shipped.load("sm_80", tmp_path)
    assert portfolio.cards == ("a100",) and portfolio.measured_on == "A100"
    assert portfolio.classes == ("first few", "second few")
    read = portfolio.kernel_class("first few")
    assert read.worst == 1.2 and read.points.tolist() == row["points"]
    assert [k.resident for k in read.kernels] == [3]
    assert read.kernels[0].config == config, "with the default of a parameter that is younger than the file"
    assert read.kernels[0].config.id == config.id and read.kernels[0].errors.tolist() == kernel["errors"]
    with pytest.raises(ValueError):
        portfolio.kernel_class("second few")


def test_a_file_that_is_read_and_saved_is_the_same(tmp_path):
    path = shipped.DATA / "sm_90a.jsonl"
    head, groups = shipped.read(path)
    shipped.save(tmp_path / "again", head["cards"], head["about"], groups, head["genes"])
    assert (tmp_path / "again").read_bytes() == path.read_bytes()


def test_whole_numbers_are_written_without_a_point_and_read_as_floats(tmp_path):
    config = load_space("flash_mma", H100).starting_configs()[0]
    kernel = {"family": config.family, "params": config.params, "resident": 1}
    row = {"points": [[0.0], [-2.0]], "kernels": [kernel | {"constants": [0.0, 1.5], "errors": [[0.0, 3.0]]}]}
    row["classes"] = {"few": {"kernels": [0], "problems": 1, "regret": 1.0, "worst": 1.25}}
    shipped.save(tmp_path / "sm_90a.jsonl", [], [], {"first": row}, {})
    text = (tmp_path / "sm_90a.jsonl").read_text()
    assert '"points":[[0],[-2]]' in text and '"constants":[0,1.5],"errors":[[0,3]]' in text
    assert shipped.read(tmp_path / "sm_90a.jsonl")[1] == {"first": row}
    whole = shipped.load("sm_90a", tmp_path).kernel_class("first few")
    assert whole.points.dtype == whole.kernels[0].errors.dtype == float


def test_the_data_is_small():
    assert sum(f.stat().st_size for f in shipped.DATA.iterdir()) < 1_000_000


def test_a_class_of_a_variant_that_nobody_draws_takes_the_plain_one():
    shape = "B=4,H=8,S=2000,D=64,dtype=bf16,mask="
    unusual, usual = pick(parse_shape(f"{shape}full,sink=1"), H100), pick(parse_shape(f"{shape}causal,sink=1"), H100)
    assert unusual.estimated and "'16 d64 full many'" in unusual.why
    assert not usual.estimated and "'16 d64 causal+sink many'" in usual.why


@pytest.mark.slow
def test_a_thousand_problems_of_variants_get_kernels_that_can_run():
    problems = [p for kind in KINDS for p in draw_kind(kind, 600, 160)] + draw_variants(600, 200)
    for problem in problems:
        found = pick(problem, H100)
        assert found, problem.describe()
        assert registry.lookup(found.family).why_impossible(problem, found.config, H100) is None
        assert found.expected_regret is None or not found.estimated


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("packed", "cached", "paged"))
def test_a_pick_is_the_same_whatever_the_lengths_on_the_device(kind):
    for problem in draw_kind(kind, 601, 40):
        seen = known(problem)
        assert seen.sequences != problem.sequences or problem.batch < 3 or len(set(problem.sequences)) < 3
        assert seen.shape("q") == problem.shape("q") and seen.shape("k") == problem.shape("k")
        assert class_of(seen) == class_of(problem)
        mine, theirs = pick(problem, H100), pick(seen, H100)
        assert (mine.family, mine.config) == (theirs.family, theirs.config)


def test_wide_heads_get_a_kernel_of_their_class_as_it_is():
    portfolio, served = shipped.load("sm_90a"), set()
    for problem in draw_wide(700, 150):
        found = pick(problem, H100)
        if problem.dtype == "fp32" and found.estimated:
            continue  # PyTorch may be faster there
        assert found and not found.estimated and found.expected_regret, problem.describe()
        assert registry.lookup(found.family).why_impossible(problem, found.config, H100) is None
        made = portfolio.kernel_class(class_of(problem))
        assert found.config in [config for k in made.kernels for config in k.variants()]
        served.add(found.family)
    assert "large_head_mma" in served
    one_head = pick(parse_shape("B=1,H=1,S=4096,D=512,dtype=fp32,mask=full"), H100)
    assert one_head.family == "large_head" and not one_head.estimated
    gemma = pick(lookup("gemma4_full"), H100)
    assert gemma.family == "large_head_mma" and not gemma.estimated
    assert pick(parse_shape("B=4,H=32,S=1000,D=512,dtype=fp32,mask=full"), H100).estimated


def test_the_nearest_class_has_no_variants_that_the_problem_lacks():
    names = ("16 d64 full few", "16 d128 full few", "16 d64 full+seqused few", "16 d64 full+seqused+page few")
    near = classes_for("16 d64 full+sink+seqused+page few", names)
    assert near == [names[3], names[2], names[0], names[1]]
    assert classes_for("16 d96 full+seqused few", names) == [names[1], names[2], names[0]]
    assert classes_for("16 d64 full few", names) == [names[0], names[1]]
    assert not classes_for("16 d64 causal few", names) and not classes_for("16 d64 full many", names)


def test_what_no_kernel_serves_has_no_pick():
    assert pick(parse_shape("B=1,H=4,S=64,D=2048,dtype=fp32,mask=full"), GPUS["a100"]) is None


def test_a_search_begins_at_the_pick():
    problem = draw(503, 1)[0]
    assert portfolio_kernels(problem, H100)[0] == pick(problem, H100).config


def test_classes_tell_few_rows_from_many():
    many = parse_shape("B=1,H=8,Hkv=2,S=4096,D=64,dtype=bf16,mask=causal")
    assert class_of(many) == "16 d64 causal many-grouped"
    assert class_of(many.with_(seqlen_q=2112)) == "16 d64 causal many-grouped"
    assert class_of(many.with_(seqlen_q=2048)) == "16 d64 causal short-grouped"
    assert class_of(many.with_(seqlen_q=2048, seqlen_k=512)) == "16 d64 causal short-brief-grouped"
    assert class_of(many.with_(seqlen_q=32)) == "16 d64 causal few-narrow-grouped"
    assert class_of(many.with_(seqlen_q=4)) == "16 d64 causal decode-narrow-grouped"
    assert class_of(many.with_(seqlen_q=4, batch=34)) == "16 d64 causal decode-grouped"
    assert class_of(many.with_(seqlen_q=33, dtype="fp32", mask="full")) == "32 d64 full short-grouped"
    assert class_of(many.with_(value_dim=32, sink=True)) == "16 d64 causal+sink+dv32 many-grouped"
    assert class_of(many.with_(kv_heads=8)) == "16 d64 causal many"
    assert len({class_of(p).split()[-1] for p in draw(504, 500)}) == 16


def test_a_latent_cache_gets_a_kernel_that_nobody_measured():
    problem = lookup("mla_decode")
    found = pick(problem.with_(seqlen_q=2, mask="causal_lower_right"), H100)
    assert found.family == "latent_wgmma" and found.estimated and found.config["SPLITS"] == 1
    assert "cost model" in found.why
    found = pick(problem, H100)
    assert found.family == "latent_wgmma" and not found.estimated and found.config["SPLITS"] == 1
    one = pick(problem.with_(batch=1), H100)
    assert one.config["SPLITS"] > 1, "one sequence has fewer tiles of rows than the card has SMs"
    many = pick(problem.with_(batch=60, seqlen_k=6000), H100)
    assert many.config["WARPGROUPS"] == 3 and one.config["WARPGROUPS"] == 2, "as measured with many tiles and with few"
    assert pick(problem, GPUS["a100"]) is None
