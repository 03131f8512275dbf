"""The check at a kernel's first use on a machine: what it says of the kernel stays, other failures do not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import evoattn
from evoattn.backends.base import ContextLost, LaunchError
from evoattn.backends.cubins import Cubin, recipe_of
from evoattn.backends.platform import CudaPlatform, error_of
from evoattn.families import registry
from evoattn.families.registry import load_space
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from evoattn.model.space import KernelConfig
from evoattn.ops.attention import attention
from evoattn.ops.call import strided
from evoattn.ops.check import cases_of, record_check, recorded_check
from evoattn.ops.choice import Choice, Race
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from evoattn.portfolio.pick import of_its_code
from evoattn.portfolio.wins import Races
from tests.ops.fake_clock import FakeClock
from tests.ops.fake_device import (
    BUILT,
    CONFIG,
    CacheDevice,
    Pick,
    build,
    fake_runtime,
    near,
    reference,
    split_kv_pick,
    tensors,
)


@pytest.fixture(autouse=True)
def nothing_is_checked_yet():
    BUILT.clear()


def broken(device, status):
    """What waiting for the device comes to after a kernel went wrong."""

    def wait(index):
        raise error_of(status, f"{device.describe(status)}.")

    return wait


def test_a_kernel_that_answers_wrong_is_never_used_on_this_machine(device, tmp_path):
    device.error = 0.05
    q, k, v = tensors()
    with pytest.warns(RuntimeWarning, match="failed its check on this machine: .*largest error"):
        answer = attention(q, k, v, enable_gqa=True)
    assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    device.error = 0.0  # the record counts, in the next process too
    with current.use(fake_runtime(device, tmp_path)):
        with pytest.warns(RuntimeWarning, match="never used here"):
            attention(q, k, v, enable_gqa=True)
        with pytest.raises(NoKernel, match="failed its check"):
            attention(q, k, v, enable_gqa=True, strict=True)


@pytest.mark.slow
@pytest.mark.parametrize("status", [2, 600, 701, 900], ids=["no memory", "not ready", "resources", "a capture"])
def test_a_launch_that_is_refused_during_a_check_is_tried_again_by_the_next_process(device, tmp_path, status):
    q, k, v = tensors()
    device.status = status
    with pytest.warns(RuntimeWarning, match=f"fake error {status}; SDPA runs"):
        attention(q, k, v, enable_gqa=True)
    device.status = 0
    with pytest.raises(NoKernel, match=f"fake error {status}"):
        attention(q[:, :, :9], k, v, enable_gqa=True, strict=True)  # not in this one
    assert not list(tmp_path.glob("*.check"))
    with current.use(fake_runtime(device, tmp_path)):
        assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))


def test_a_function_that_is_not_loaded_for_want_of_memory_is_no_failed_check(device, tmp_path):
    def refuse(module, name):
        raise LaunchError(f"The driver could not load {name}: out of memory (CUDA error 2).")

    enough, device.function = device.function, refuse
    with pytest.warns(RuntimeWarning, match="out of memory .CUDA error 2.; SDPA runs"):
        attention(*tensors(), enable_gqa=True)
    device.function = enough
    with current.use(fake_runtime(device, tmp_path)):
        attention(*tensors(), enable_gqa=True, strict=True)


@pytest.mark.parametrize("status", [700, 702, 715, 716, 719])
def test_a_kernel_that_goes_wrong_in_its_check_is_never_used_on_this_machine(device, tmp_path, status):
    def launch(*arguments):
        device.synchronize = broken(device, status)
        return 0

    healthy, device.launch = (device.launch, device.synchronize), launch
    with pytest.warns(RuntimeWarning, match=f"failed its check on this machine: fake error {status}; it is never used"):
        attention(*tensors(), enable_gqa=True)
    device.launch, device.synchronize = healthy
    with current.use(fake_runtime(device, tmp_path)), pytest.warns(RuntimeWarning, match=f"fake error {status}; it is"):
        attention(*tensors(), enable_gqa=True)
    assert not device.launches


def test_a_check_runs_what_a_launch_with_splits_adds(tmp_path):
    """The record counts for all numbers of splits, of which a race may have others."""
    device, (q, k, v) = CacheDevice(), tensors()
    device.merge_error = 0.05
    warns = pytest.warns(RuntimeWarning, match="failed its check on this machine: .*largest error")
    with current.use(fake_runtime(device, tmp_path, split_kv_pick)), warns:
        attention(q, k, v, enable_gqa=True, seqused_k=torch.tensor([45, 3], dtype=torch.int32))


def test_rivals_of_the_pick_s_code_are_compiled_and_checked_with_it(tmp_path):
    """Though nothing was written to the folder that keeps kernels."""
    device, clock, built = CacheDevice(), FakeClock(), []
    clock.time_us = lambda run, count: run() or 10.0
    pick = KernelConfig("split_kv", CONFIG)
    others = tuple(KernelConfig("split_kv", CONFIG | {"SPLITS": splits}) for splits in (2, 3))

    def counted(*recipe):
        built.append(recipe)
        return build(*recipe)

    race = Race(Races(tmp_path / "races.jsonl"), clock, 1)
    runtime = Runtime(device, lambda *of: Pick("split_kv", pick, rivals=others), tmp_path / "op", counted, race=race)
    q, k, v = tensors()
    with current.use(runtime):
        evoattn.attention(q, k, v, enable_gqa=True, seqused_k=torch.tensor([45, 3], dtype=torch.int32), strict=True)
    assert len(built) == device.loads == 1 and "split_kv_merge" in device.launches


FEW = "B=2,H=8,Hkv=2,Sq=1,Sk=4096,D=128"
LATENT = "B=2,H=16,Hkv=1,Sq=1,Sk=4096,D=576,value_dim=512,shared_kv=1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "family"),
    [
        (FEW, "split_kv"),
        (f"{FEW},seqused=0:4096,page=16,window=1000:0,mask=causal_lower_right", "split_kv"),
        (f"{FEW},seqused=0:4096,page=256,appended=1", "split_kv"),
        (f"{LATENT},seqused=0:4096,page=64", "latent_wgmma"),
        (f"{FEW},op=backward", "backward_wgmma"),
        ("B=2,H=8,S=4096,D=128,op=quantize,kv=e4m3,scales=head", "quantize"),
        ("B=1,H=8,Sq=512,Sk=4,D=128,op=merge", "merge_parts"),
        (f"{FEW},op=append_halves,seqused=0:4096", "append_kv"),
    ],
)
def test_every_operation_has_cases_and_splits_are_some_of_them(shape, family):
    problem, gpu, family = strided(parse_shape(shape)), GPUS["h200"], registry.lookup(family)
    configs = [c for c in load_space(family.name, gpu).starting_configs() if not family.why_impossible(problem, c, gpu)]
    for config in configs:
        ways, found = of_its_code(config), cases_of(Choice(family, config, problem, gpu, ""))
        assert len(found) == 2 and len({recipe_of(family, problem, one, gpu) for one in ways}) == 1
        scratch = {bool(family.workspace(case.problem, one, gpu)) for case in found for one in ways}
        assert len(ways) == 1 or scratch == {True, False}, config.describe()
    assert configs


def test_a_fault_before_a_check_is_not_held_against_the_kernel(device, tmp_path):
    """Of a kernel of the user's own, whose fault shows where the device is waited for next."""
    healthy, device.synchronize = device.synchronize, broken(device, 700)
    with pytest.warns(RuntimeWarning, match="fake error 700; SDPA runs"):
        attention(*tensors(), enable_gqa=True)
    device.synchronize = healthy
    with current.use(fake_runtime(device, tmp_path)):
        attention(*tensors(), enable_gqa=True, strict=True)


def test_a_check_that_passed_is_not_repeated(device, tmp_path):
    attention(*tensors(), enable_gqa=True)
    assert len(device.launches) > 1
    device.launches.clear()
    with current.use(fake_runtime(device, tmp_path)):
        attention(*tensors(), enable_gqa=True)
    assert len(device.launches) == 1


def test_a_check_heeds_no_setting_of_the_caller_s_and_sets_none_of_the_process(device, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", None)  # threads that begin meanwhile would keep the number
    q, k, v = tensors()
    with torch.device("meta"):
        answer = attention(q, k, v, enable_gqa=True, strict=True)
    assert near(answer, reference(q, k, v))


def test_a_check_that_breaks_off_leaves_no_kernel_in_use(device):
    def run_out(index):
        if device.launches:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    device.synchronize = run_out
    q, k, v = tensors()
    with pytest.warns(RuntimeWarning, match="out of memory; SDPA runs"):
        attention(q, k, v, enable_gqa=True)
    before = len(device.launches)
    attention(q[:, :, :9], k, v, enable_gqa=True)
    assert len(device.launches) == before, "a kernel that was never proved answers nobody"


@pytest.mark.parametrize("damage", ["", "[]", '{"cubin": "other", "machine": "a fake GPU, driver 1.0", "wrong": ""}'])
def test_a_damaged_record_of_a_check_is_made_again(device, tmp_path, damage):
    attention(*tensors(), enable_gqa=True)
    (record,) = tmp_path.glob("*.check")
    record.write_text(damage)
    device.error = 0.05
    with current.use(fake_runtime(device, tmp_path)), pytest.warns(RuntimeWarning, match="failed its check"):
        attention(*tensors(), enable_gqa=True)
    assert "largest error" in record.read_text()


class Driver:
    """In place of libcuda: what waiting for the context answers."""

    def __init__(self, status):
        self.status = status

    def cuCtxSynchronize(self):
        return self.status


class Here(CudaPlatform):
    """On a driver and a torch of which waiting fails where the driver's does."""

    def __init__(self, status):
        self._cuda = Driver(status)

    def _wait(self, index):
        if self._cuda.status:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for it.")


@pytest.mark.parametrize("status, kind", [(700, ContextLost), (719, ContextLost), (2, LaunchError), (900, LaunchError)])
def test_waiting_tells_a_kernels_fault_from_other_failures(status, kind):
    with pytest.raises(kind, match="The kernel failed: CUDA error: an illegal memory access"):
        Here(status).synchronize(0)
    Here(0).synchronize(0)


def test_a_record_counts_for_its_own_recipe_and_only_where_nobody_else_wrote_it(tmp_path):
    config = KernelConfig("flash_scalar", {})
    cubin = Cubin(b"code", "digest", "source", "recipe")
    record_check(cubin, "machine", tmp_path, config, "")
    assert recorded_check(cubin, "machine", tmp_path) == ""
    other = replace(cubin, recipe="another")
    (record,) = tmp_path.glob("*.check")
    assert recorded_check(other, "machine", tmp_path) is None
    record_check(other, "machine", tmp_path, config, "wrong")
    (place,) = set(tmp_path.glob("*.check")) - {record}
    place.write_bytes(record.read_bytes())
    assert recorded_check(other, "machine", tmp_path) is None
    record.chmod(0o666)
    with pytest.warns(RuntimeWarning, match="is passed over"):
        assert recorded_check(cubin, "machine", tmp_path) is None
