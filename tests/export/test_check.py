"""The exported file: the recorded kernel in it, and nothing of the database that is more than a comment."""

import hashlib
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from evoattn.correctness.cases import make_case
from evoattn.correctness.interpreter_cases import SmallCase, interpreter_cases
from evoattn.export.check import BEGIN, END, export_source
from evoattn.export.kept import SEED, kept_case, kept_constants
from evoattn.export.recorded import Recorded
from evoattn.families import registry
from evoattn.families.base import attention_args
from evoattn.families.registry import FAMILIES, load_space
from evoattn.model import gpu
from evoattn.model.gpu import GPUS
from evoattn.model.launch import Buffer, KernelLaunch, Scalar, TensorMap
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate, CompileInfo, Evaluation, Timing, TrialState
from evoattn.model.space import KernelConfig
from evoattn.storage import StorageError
from tests.export import kernels

PROBLEM = AttentionProblem(
    2, 4, 2, 100, 130, 64, "bf16", "causal_lower_right", "bshd", name='*/ int x; //\n#error "out"\\'
)
EVIL = '*/ int escaped;\n#include "escaped"\r\x0b\u2028#define escaped\\'


class SplitKv:
    """A family of two launches and two scratch buffers."""

    name = "split_kv"
    devices = "sm_90a"

    def why_outdated(self, config, source):
        return None

    def launches(self, problem, config, gpu):
        partial = (*attention_args(problem), Buffer("sums"), Buffer("tiles"))
        combine = (Buffer("o"), Buffer("tiles"), Scalar("int64", 1 << 40), Scalar("float32", 0.1))
        return (
            KernelLaunch("partial", (7, config["SPLITS"], 1), (128, 1, 1), 65536, partial),
            KernelLaunch("combine", (3, 1, 1), (32, 2, 1), 0, combine),
        )

    def workspace(self, problem, config, gpu):
        return {"tiles": 4096, "sums": 128}


@pytest.fixture
def storage(storage, monkeypatch):
    monkeypatch.setitem(registry.FAMILIES, "split_kv", SplitKv())
    return storage


def record(storage, source, offline=False, params=None, state=TrialState.COMPLETE):
    versions = {"evoattn": "0.1", "device": EVIL, "driver": "CUDA 13.0"}
    study = storage.create_study(
        "study " + EVIL, PROBLEM, gpu.lookup("h100"), offline, "genetic", 0, ("split_kv",), versions, {}
    )
    config = KernelConfig("split_kv", params or {"SPLITS": 4, "NOTE": EVIL})
    candidate = source and Candidate("split_kv", config.params, config.id, source, "sm_90a")
    timings = () if offline else (Timing((10.0, 11.0, 12.0), {"stage": "final", "cache": "warm", "run": "the final"}),)
    info = CompileInfo(registers=99, compiler="NVRTC 13.0", options=("-arch=sm_90a", EVIL))
    storage.add_peer(study, "flash", Timing((22.0,), {"stage": "final", "cache": "warm", "run": "the final"}))
    storage.add_peer(study, "cudnn", None, EVIL)
    return storage.record(study, config, candidate, Evaluation(state, EVIL, info, timings=timings), (1, 2), EVIL)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", ("kernel\n", "no line break", "\n\n two\r\n", "", f"{BEGIN}\nnested\n{END}\n", "µ 中 // \\\n")
)
def test_the_kernel_is_the_recorded_one_byte_for_byte(storage, source):
    trial = record(storage, source or " ")
    text = export_source(storage, trial).partition(f"\n{BEGIN}\n")[2].rpartition(f"\n{END}\n")[0]
    assert text == (source or " ")
    assert hashlib.sha256(text.encode()).hexdigest() == trial.source_hash


def test_nothing_of_the_database_leaves_its_comment(storage):
    trial = record(storage, "KERNEL\n")
    text = export_source(storage, trial)
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    provenance = head[: head.index("#include <")]
    assert "escaped" in provenance and "escaped" not in head[len(provenance) :] and "escaped" not in tail
    assert all(
        line.startswith("//") and not line.endswith("\\") and "*/" not in line
        for line in provenance.strip().split("\n")
    )
    assert re.fullmatch(r"[\n -~]*", provenance) and "\\" not in provenance and '"out"' not in tail
    assert "??" not in provenance  # ??/ was a backslash once


def test_provenance_says_where_it_comes_from(storage):
    trial = record(storage, "KERNEL\n")
    text = export_source(storage, trial)
    numbers = ("11.000 us", "2.000 x its speed", "99 registers")
    for said in (f"trial {trial.number}", trial.source_hash, "SPLITS=4", "NVRTC 13.0", "-arch=sm_90a", *numbers):
        assert said in text.split(BEGIN)[0].replace("\n//     ", " ")


def test_an_estimated_trial_has_no_numbers(storage):
    provenance = export_source(storage, record(storage, "KERNEL\n", offline=True, state=TrialState.ESTIMATED)).split(
        BEGIN
    )[0]
    assert "never timed" in provenance and "TFLOP/s" not in provenance and "SDPA" not in provenance


def test_launches_and_arguments_follow_the_family(storage):
    text = export_source(storage, record(storage, "KERNEL\n")).split(END)[1]
    strides = PROBLEM.strides("o")
    assert f"constexpr long O_STRIDES[3] = {{{strides[0]}, {strides[1]}, {strides[2]}}};" in text
    assert "constexpr bool CAUSAL = true;" in text and "constexpr bool LOWER_RIGHT = true;" in text
    assert "constexpr int BUFFERS = 6;" in text and "constexpr int LARGEST_SMEM = 65536;" in text
    first, second = re.findall(r"arguments\[\] = \{(.*?)\};", text)
    assert first.startswith("&buffer[0], &buffer[1], &buffer[2], &buffer[3], &argument_4") and first.endswith(
        "&buffer[5], &buffer[4]"
    )
    assert second == "&buffer[3], &buffer[4], &argument_2, &argument_3"
    assert "long long argument_2 = 1099511627776;" in text and "float argument_3 = float(0.1);" in text
    assert text.index("::partial, dim3(7, 4, 1), dim3(128, 1, 1)") < text.index(
        "::combine, dim3(3, 1, 1), dim3(32, 2, 1)"
    )


def test_a_launch_that_overlaps_says_so(storage, monkeypatch):
    trial = record(storage, "KERNEL\n")
    assert "cudaLaunchAttribute" not in export_source(storage, trial)
    launches = SplitKv.launches
    monkeypatch.setattr(
        SplitKv, "launches", lambda *args: (launches(*args)[0], replace(launches(*args)[1], overlaps=True))
    )
    text = export_source(storage, trial).split(END)[1]
    assert (
        "cudaLaunchKernel((const void*)::partial," in text
        and "cudaLaunchKernelExC(&config, (const void*)::combine, arguments)" in text
    )
    assert "cudaLaunchConfig_t config = {dim3(3, 1, 1), dim3(32, 2, 1), 0, stream, &overlap, 1};" in text
    monkeypatch.setattr(SplitKv, "devices", "sm_80 and newer")
    assert "needs sm_90:" in export_source(storage, trial)
    assert text.count("overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;") == 1


@pytest.mark.slow
def test_the_check_uses_what_is_generated_and_nothing_else(storage):
    text = export_source(storage, record(storage, "KERNEL\n")).split(END)[1]
    begin = text.index("// check.cuh")
    generated, check = text[:begin], text[begin:]
    code = re.sub(r'"[^"]*"|//.*', "", check)
    used = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code))
    own = set(re.findall(r"#define (\w+)|\b([A-Z][A-Z0-9_]+) = ", code))
    offered = set(re.findall(r"\b([A-Z][A-Z0-9_]+)(?:\[\w*\])? = ", generated))
    assert used - {"__GNUC__", "INFINITY", "TYPE"} - {name for pair in own for name in pair} == offered


def test_the_architecture_that_the_family_needs(storage):
    text = export_source(storage, record(storage, "KERNEL\n"))
    assert (
        '#error "this kernel needs sm_90a' in text
        and "defined(__CUDA_ARCH_FEAT_SM90_ALL)" in text
        and "MINIMUM_SM = 90;" in text
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, gpu, arch, fields",
    [
        ("flash_wgmma", "h100", "sm_90a", dict(window="9:0", mask="causal_upper_left", sink=True)),
        ("flash_mma", "a100", "sm_80", dict(seqused="100:500", page=64, bias="hs", scale=0.3)),
        ("flash_mma", "a100", "sm_80", dict(varlen="100:300/200:500", value_dim=32)),
        ("flash_wmma", "a100", "sm_80", {}),
    ],
)
@pytest.mark.sampled(4)
def test_nvcc_compiles_the_file(database, tmp_path, nvcc, family, gpu, arch, fields):
    (tmp_path / "kernel.cu").write_text(export_source(database, kernels.record(database, family, gpu, **fields)))
    command = [nvcc, f"-arch={arch}", "-c", tmp_path / "kernel.cu", "-o", tmp_path / "kernel.o"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "evoattn_check" not in result.stderr, result.stderr


@pytest.mark.parametrize("source, name, number", [("KERNEL\n", "sm_80", 80), ("wgmma.mma_async.sync\n", "sm_90a", 90)])
def test_the_architecture_that_a_kernel_needs_beyond_its_family(storage, monkeypatch, source, name, number):
    monkeypatch.setattr(SplitKv, "devices", "sm_80 and newer")
    text = export_source(storage, record(storage, source))
    assert f"needs {name}:" in text and f"MINIMUM_SM = {number};" in text
    assert ("defined(__CUDA_ARCH_FEAT_SM90_ALL)" in text) == (name == "sm_90a")


@pytest.mark.parametrize(
    "change",
    [{"cluster": (2, 1, 1)}, {"args": (TensorMap("k", "fp16", (64, 8), (128,), (64, 8)),)}],
    ids=lambda change: next(iter(change)),
)
def test_clusters_and_tensor_maps_are_of_hopper(storage, monkeypatch, change):
    monkeypatch.setattr(SplitKv, "devices", "sm_80 and newer")
    launches = SplitKv.launches
    monkeypatch.setattr(SplitKv, "launches", lambda *args: (launches(*args)[0], replace(launches(*args)[1], **change)))
    assert "needs sm_90:" in export_source(storage, record(storage, "KERNEL\n"))


def test_tensor_maps_are_encoded_by_the_driver(storage):
    space = load_space("flash_wgmma", gpu.lookup("h100"))
    params = next(c.params for c in space.starting_configs() if (c["BLOCK_M"], c["BLOCK_N"]) == (128, 128))
    study = storage.create_study("maps", PROBLEM, gpu.lookup("h100"), True, "genetic", 0, ("flash_wgmma",), {}, {})
    config = KernelConfig("flash_wgmma", params)
    candidate = Candidate("flash_wgmma", params, config.id, "KERNEL\n", "sm_90a")
    text = export_source(
        storage, storage.record(study, config, candidate, Evaluation(TrialState.COMPLETE), (), "starting")
    )
    assert "#include <cuda.h>" in text and "cudaGetDriverEntryPointByVersion" in text
    sizes, strides, box = "{64, 130, 1, 2, 2}", "{256, 128, 128, 33280}", "{64, 128, 1, 1, 1}"
    kind = "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_SWIZZLE_128B"
    assert f"tensor_map(buffer[1], {kind}, {sizes}, {strides}, {box})" in text


def test_a_kernel_without_a_reference_brings_a_small_case_of_its_inputs_and_answer(storage):
    trial = kernels.record(
        storage, "quantize", "h100", heads=2, seqlen_k=300, op="quantize_smooth", kv="int8", scales="head"
    )
    read = Recorded.read(storage, trial)
    case, launches, workspace = kept_case(read)
    text = export_source(storage, trial)
    buffers = [*case.tensors, *case.answer, *workspace]
    assert kept_constants(case, buffers) in text and "".join(launch.kernel for launch in launches) in text
    assert f"constexpr int BUFFERS = {len(buffers)};" in text and "PROOF" not in text and "evoattn_check" in text
    assert f"times a small problem of this kernel: {case.problem.describe()}." in text.replace("\n//     ", " ")


def test_what_cannot_be_exported(storage):
    with pytest.raises(StorageError, match="never became source"):
        export_source(storage, record(storage, None))


def test_a_config_of_another_version(storage):
    with pytest.raises(StorageError, match="not of this version"):
        export_source(storage, record(storage, "KERNEL\n", params={"OTHER": 1}))


def test_a_source_that_was_changed(storage, monkeypatch):
    trial = record(storage, "KERNEL\n")
    monkeypatch.setattr(storage, "source", lambda _: "KERNEL ")
    with pytest.raises(StorageError, match="not what was recorded"):
        export_source(storage, trial)


BUFFERS = ["sinks", "o", "lse", "q", "k", "v"]


def words(text, name):
    found = re.search(rf"constexpr unsigned {name}\[\] = \{{([^}}]*)\}};", text)
    return np.array([int(word, 16) for word in found[1].split(", ")], "<u4")


def listed(text, name):
    return re.search(rf" {name}\[\w+\] = \{{([^}}]*)\}};", text)[1].split(", ")


def test_a_kept_case_reads_back_as_it_was():
    problem = AttentionProblem(1, 3, 1, 5, 9, 24, "fp16", layout="bshd", lse=True, sink=True)
    case = make_case("", problem, 1, "cpu")
    text = kept_constants(case, BUFFERS)
    for name, tensor in case.tensors.items():
        memory = words(text, f"INPUT_{name.upper()}").tobytes()
        flat = torch.frombuffer(bytearray(memory), dtype=tensor.dtype)
        assert len(memory) - 4 < tensor.numel() * tensor.element_size() <= len(memory)
        assert torch.equal(flat[: tensor.numel()].as_strided(tensor.shape, tensor.stride()), tensor)
    o = torch.from_numpy(words(text, "ANSWER_O").view(np.float32).copy())
    laid_out = o.as_strided(problem.shape("o"), problem.strides("o"))
    torch.testing.assert_close(laid_out.double(), case.answer["o"].values.double(), atol=1e-6, rtol=1e-6)
    lse = torch.from_numpy(words(text, "ANSWER_LSE").view(np.float32).copy())
    torch.testing.assert_close(lse, case.answer["lse"].values.float().flatten())
    names = list(case.tensors)
    assert f"KEPT_INPUTS = {len(names)}, ANSWERS = 2;" in text
    assert listed(text, "INPUT_BUFFERS") == [str(BUFFERS.index(name)) for name in names]
    assert listed(text, "INPUT_WORDS") == [f"INPUT_{name.upper()}" for name in names]
    assert listed(text, "ANSWER_BUFFERS") == ["1", "2"] and listed(text, "ANSWER_NAMES") == ['"o"', '"lse"']
    assert listed(text, "ANSWER_WORDS") == ["ANSWER_O", "ANSWER_LSE"]
    assert listed(text, "ANSWER_DTYPES") == ["Dtype::fp16", "Dtype::fp32"]
    assert listed(text, "ANSWER_ELEMENTS") == [str(5 * 3 * 24), "15"]
    answers = case.answer.values()
    assert listed(text, "ALLOWED_LARGEST") == [repr(exact.allowed_error) for exact in answers]
    assert listed(text, "ALLOWED_RMS") == [repr(case.answer["o"].allowed_rms), "INFINITY"]
    assert listed(text, "LOGARITHMS") == ["false", "true"]


@pytest.mark.parametrize("family", ["flash_mma", "three_kernel"])
def test_the_kept_case_is_plain_and_small_but_not_the_least(family):
    problem = AttentionProblem(1, 2, 2, 100, 100, 64, "fp16")
    config, gpu = load_space(family, GPUS["l4"]).starting_configs()[0], GPUS["l4"]
    recorded = SimpleNamespace(family=FAMILIES[family], config=config, problem=problem, study=SimpleNamespace(spec=gpu))
    case, launches, scratch = kept_case(recorded)
    usual = interpreter_cases(problem, config)
    plain = [c for c in usual if c.kind == "plain" and not (c.far or c.sms or c.cold or c.late_blocks)]
    larger = sorted(plain, key=lambda c: c.problem.flops)[len(plain) // 2 :]
    least = min(larger, key=lambda c: sum(tensor.bytes for tensor in c.problem.inputs))
    assert (case.name, case.problem) == (least.name, least.problem)
    again = SmallCase(least.name, least.problem).make(SEED)
    assert all(torch.equal(case.tensors[name], tensor) for name, tensor in again.tensors.items())
    assert launches == FAMILIES[family].launches(case.problem, config, gpu)
    assert scratch == FAMILIES[family].workspace(case.problem, config, gpu)
