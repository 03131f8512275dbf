"""The op in forked children, in processes without a home directory, and in threads that begin together. The op on
other threads, streams and devices than the one that it first ran on, and in a capture."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from evoattn.backends.platform import find_platform
from evoattn.model import forks
from evoattn.model.paths import ROOT
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig
from evoattn.ops import block_masks
from evoattn.ops.attention import attention
from evoattn.ops.call import Call, terms_of
from evoattn.ops.custom_op import operands, variant_op
from evoattn.ops.explain import warmup
from evoattn.ops.given import of_sequences
from evoattn.ops.plan import MOST_KEPT, CallPlan, Scratch
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import (
    WGMMA,
    CacheDevice,
    FakeDevice,
    Pick,
    build,
    fake_runtime,
    near,
    reference,
    split_kv_pick,
    tensors,
    wgmma_pick,
)


def in_child(work, seconds=200.0):
    """What `work` returns in a forked child, as text; it fails if the child does not end."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads, which is what is tested
        child = os.fork()
    if not child:
        try:
            os.write(write, str(work()).encode())
        except BaseException as error:
            os.write(write, repr(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    until = time.monotonic() + seconds
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    with os.fdopen(read) as file:
        return file.read()


def answer_of_the_child():
    q, k, v = tensors()
    return near(attention(q, k, v, enable_gqa=True), reference(q, k, v))


@pytest.mark.slow
def test_a_thread_that_forks_while_it_holds_a_lock_holds_it_in_the_child():
    lock, free = forks.Lock(), []

    def other():
        with lock:
            free.append(True)

    def in_the_block():
        with lock:
            pass
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        held = not free
        lock.__exit__()
        lock.__exit__()
        thread.join(100)
        return held, free

    with lock, lock:
        assert in_child(in_the_block) == "(True, [True])"
    with lock:
        pass
    other()


@pytest.mark.parametrize("lock", [forks.Lock(), block_masks.ALONE], ids=["", "of torch's FlexAttention"])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(lock):
    taken, done = threading.Event(), threading.Event()

    def hold():
        with lock:
            taken.set()
            done.wait(200)

    def take():
        with lock:
            return "taken"

    with lock:  # so that this thread was its last holder but one
        pass
    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(100)
    assert in_child(take) == "taken"
    done.set()
    thread.join()


def test_a_child_does_not_wait_for_a_thread_that_it_lacks(device, tmp_path):
    """It is forked while a thread of the parent compiles a kernel, as workers of a data loader may be."""
    compiling, go_on = threading.Event(), threading.Event()
    parent = os.getpid()

    def slow(*arguments):
        if os.getpid() == parent:
            compiling.set()
            go_on.wait(300)
        return build(*arguments)

    with current.use(Runtime(device, wgmma_pick, tmp_path, build=slow)):
        thread = threading.Thread(target=lambda: attention(*tensors(), enable_gqa=True))
        thread.start()
        try:
            assert compiling.wait(200)
            assert in_child(answer_of_the_child) == "True"
        finally:
            go_on.set()
            thread.join()
        assert answer_of_the_child()


def test_a_child_of_a_process_that_has_used_cuda_is_served_by_torch(device):
    attention(*tensors(), enable_gqa=True, strict=True)
    device.lost_in_fork = lambda: True  # seen by the child: the parent has decided its calls

    def work():
        before = len(device.launches)
        q, k, v = tensors()
        same = torch.equal(
            attention(q, k, v, enable_gqa=True), F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        )
        with pytest.raises(NoKernel):
            attention(q, k, v, enable_gqa=True, strict=True)
        return same, len(device.launches) - before

    assert in_child(work) == "(True, 0)"
    attention(*tensors(), enable_gqa=True, strict=True)


def test_a_first_call_in_such_a_child_finds_no_device():
    assert find_platform(lambda: FakeDevice(lost_in_fork=lambda: True)) is None


def test_threads_that_begin_together_load_one_kernel(tmp_path):
    """It is compiled slowly, once; all get the right answer."""
    device, compiled, begin = FakeDevice(), [], threading.Barrier(6)
    wrong = []

    def slow(*arguments):
        compiled.append(arguments)
        time.sleep(0.05)
        return build(*arguments)

    def work(rows):
        q, k, v = tensors(seqlen_q=rows)
        begin.wait(200)
        if not near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v)):
            wrong.append(rows)

    with current.use(Runtime(device, wgmma_pick, tmp_path, build=slow)):
        threads = [threading.Thread(target=work, args=(37 + i % 3,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong and len(compiled) == 1 and device.loads == 1


HOMELESS = """
    import torch, evoattn
    from evoattn.families.registry import FAMILIES
    from evoattn.model.gpu import GPUS
    from evoattn.model.paths import cubin_cache
    from evoattn.model.problem import AttentionProblem
    from evoattn.families.registry import load_space
    from evoattn.model.space import KernelConfig
    from evoattn.backends.platform import find_platform
    from evoattn.ops.runtime import FOLDER, current
    from evoattn.backends.cubins import get_cubin

    q = torch.randn(1, 2, 8, 64)
    assert torch.equal(evoattn.attention(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    problem = AttentionProblem(1, 2, 2, 64, 64, 64)
    assert current.best_known(problem, GPUS["h100"])
    config = KernelConfig("flash_scalar", load_space("flash_scalar", GPUS["l4"]).starting[0])
    found = get_cubin(FAMILIES["flash_scalar"], problem, config, GPUS["l4"], cubin_cache() / "op")
    assert found.code.startswith(b"\\x7fELF")
"""


def run_without_a_home(*before, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EVOATTN", "XDG", "CUPY"))}
    environment.pop("HOME", None)
    environment |= {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    code = textwrap.dedent(HOMELESS)
    subprocess.run([*before, sys.executable, "-c", code], check=True, env=environment, cwd="/", timeout=600)


@pytest.mark.slow
def test_a_process_whose_home_is_read_only_calls_and_compiles():
    run_without_a_home(HOME="/proc")


@pytest.mark.slow
def test_a_process_without_a_home_calls_and_compiles():
    nobody = "setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"
    asked = [*nobody, sys.executable, "-c", "import os, pwd; pwd.getpwuid(os.getuid())"]
    if not shutil.which("setpriv") or b"KeyError" not in subprocess.run(asked, capture_output=True).stderr:
        pytest.skip("only root can become a user whom the machine does not know")
    run_without_a_home(*nobody)


@pytest.mark.slow
def test_the_next_process_finds_what_picks_came_to(tmp_path):
    """In the cache of compiled kernels, and without the cost model, whose weights it need not read."""
    code = """
        import sys
        from evoattn.model.gpu import GPUS
        from evoattn.model.problem import AttentionProblem
        from evoattn.backends.platform import find_platform
        from evoattn.ops.runtime import FOLDER, current
        problem = AttentionProblem(batch=49, heads=64, kv_heads=16, seqlen_q=39, seqlen_k=39, head_dim=64)
        print(current.best_known(problem, GPUS["h100"]), "evoattn.cost.cost" in sys.modules)
    """
    environment = os.environ | {"EVOATTN_CACHE": str(tmp_path), "XDG_DATA_HOME": str(tmp_path / "data")}
    words = [sys.executable, "-c", textwrap.dedent(code)]
    said = [subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert said[0].endswith(" True\n") and said[1].endswith(" False\n")
    assert said[0].removesuffix(" True\n") == said[1].removesuffix(" False\n")
    assert [path.suffix for path in (tmp_path / "op").iterdir()] == [".climbs"]


@pytest.mark.slow
def test_streams_have_zeroed_scratch_of_their_own(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    q, k, v = tensors(batch=4, heads=64, kv_heads=64)
    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime):
        for stream in (7, 8, 7):
            device.now = stream
            assert near(attention(q, k, v, strict=True), reference(q, k, v))
        assert [one.stream for one in device.launches[-3:]] == [7, 8, 7]
        device.now = 9  # compiled code may be about to be captured: zeros that stay come from no graph's pool
        torch.ops.evoattn.attention(q, k, v, "full", False, None, True)
        device.is_capturing = True
        attention(q, k, v, strict=True)
    assert [one.stream for one in device.launches[-2:]] == [9, 9]
    assert set(runtime._kernels._scratch._kept) == {(-1, 7, True), (-1, 8, True), (-1, 9, True)}
    assert device.outside == 1


def test_memory_of_variants_in_compiled_code_comes_from_no_pool(tmp_path):
    """The first runs of compiled code may allocate from the pool of a graph that is to come, whose replays would write
    into what is kept."""

    def pick(problem, gpu):
        parts = split_kv_pick(problem, gpu).config.params | {"SPLITS": 2, "MERGE": "last_block"}
        return Pick("split_kv", KernelConfig("split_kv", parts))

    device, (q, k, v) = CacheDevice(), tensors()
    used = torch.full((2,), 45, dtype=torch.int32)
    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        variant_op(*operands(Call(q, k, v, enable_gqa=True, terms=terms_of(seqused_k=used), strict=True)))
        assert device.outside == len(runtime._kernels._scratch._kept) > 0


@pytest.mark.slow
def test_memory_of_packed_sequences_in_compiled_code_comes_from_no_pool(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    q, k, v = (torch.randn(1024, 16, 64).half() for _ in range(3))
    starts = torch.tensor([0, 300, 1024], dtype=torch.int32)
    terms = terms_of(cu_seqlens_q=starts, cu_seqlens_k=starts)
    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        variant_op(*operands(Call(**of_sequences(q, k, v, (1024, 1024), None), terms=terms, strict=True)))
        assert device.outside == len(runtime._kernels._scratch._kept) > 0


def test_scratch_is_kept_per_stream_unless_it_is_large(device):
    scratch, here = Scratch(device), torch.device("cpu")
    kept = scratch.get(64, False, here, -1, 7, False)
    assert scratch.get(16, False, here, -1, 7, False) is kept
    assert scratch.get(16, True, here, -1, 7, False) is not kept
    assert scratch.get(16, False, here, -1, 8, False) is not kept
    assert scratch.get(16, False, here, -1, 7, True) is kept
    device.is_capturing = True
    assert scratch.get(16, False, here, -1, 7, True) is not kept, "a graph has memory of its own"
    device.is_capturing = False
    large = scratch.get(MOST_KEPT + 1, False, here, -1, 9, False)
    assert scratch.get(MOST_KEPT + 1, False, here, -1, 9, False) is not large
    assert scratch.get(65, False, here, -1, 7, False).numel() == 65
    scratch.forget()
    assert scratch.get(64, True, here, -1, 7, False).count_nonzero() == 0


def test_a_thread_without_a_context_gets_one(device):
    q, k, v = tensors()
    attention(q, k, v, enable_gqa=True)
    device.status, before = 201, device.contexts
    original = device.make_context_current

    def heal(index):
        device.status = 0
        original(index)

    device.make_context_current = heal
    assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))
    assert device.contexts == before + 1


def test_a_capture_loads_nothing(device):
    q, k, v = tensors()
    device.is_capturing = True
    with pytest.warns(RuntimeWarning, match=r"SDPA was captured for B=2.*call evoattn.warmup"):
        answer = attention(q, k, v, enable_gqa=True)
    assert torch.equal(answer, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, enable_gqa=True)  # said once
        device.is_capturing = False
        assert warmup(["B=2,H=4,Hkv=2,Sq=37,Sk=45,D=64,dtype=fp16"])[0].startswith("flash_wgmma")
        device.is_capturing, before = True, device.loads
        assert near(attention(q, k, v, enable_gqa=True, strict=True), reference(q, k, v))
        attention(q[:, :, :9].clone(), k, v, enable_gqa=True, strict=True)  # another shape, the same kernel
    assert device.loads == before


def test_another_current_device_is_guarded(device):
    device.here = 3
    guards = len(device.guards)
    attention(*tensors(), enable_gqa=True, strict=True)
    assert device.guards[-1] == -1
    assert len(device.guards) > guards


def test_threads_share_a_plan(device):
    rounds, wrong = 20, []
    inputs = [tensors() for _ in range(4)]
    inputs = [tuple(t + i for t in three) for i, three in enumerate(inputs)]
    expected = [reference(*three) for three in inputs]

    def work(i):
        for _ in range(rounds):
            if not near(attention(*inputs[i], enable_gqa=True, strict=True), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert device.loads == 1


class SlowLaunch:
    """Of a call called `name`: what a launch is to a plan."""

    config = arguments = None
    kernel, addresses = "slow", 6

    def __init__(self, name):
        self.function, self.binding = name, self

    def bind(self, addresses, sizes=None):
        pass

    def set_stream(self, stream):
        pass


@pytest.mark.parametrize("names", ["aa bb cc", "aa bb c"])
def test_calls_of_several_launches_of_one_stream_do_not_mix(device, names):
    """Threads share torch's default stream, and so its scratch memory: the second launch reads what the first wrote,
    and a call of one launch may write there too."""
    launched = []

    def launch(config, function, arguments, extra):
        launched.append(function)
        time.sleep(0.002)  # other threads run meanwhile, as in a call of the driver
        return 0

    device.launch = launch
    scratch, problem = Scratch(device), AttentionProblem(2, 4, 2, 37, 45, 64)
    kernel = SimpleNamespace(index=-1, failure="")
    calls = names.split()
    choice = SimpleNamespace(problem=problem, words="")
    plans = [CallPlan(choice, kernel, tuple(map(SlowLaunch, call)), (64, 0, scratch), (), device) for call in calls]
    q, k, v = tensors()

    def work(plan):
        for _ in range(5):
            assert plan.run(Call(q, k, v), (q, k, v, q), None) == ""

    threads = [threading.Thread(target=work, args=(plan,)) for plan in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted("".join(launched)) == sorted(5 * "".join(calls))
    assert not "".join(launched).replace("aa", "").replace("bb", "").replace("cc", "").replace("c", "")


@pytest.mark.slow
def test_without_memory_for_scratch_torch_answers(device, tmp_path):
    def pick(problem, gpu):
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", WGMMA | {"SCHEDULE": "claimed"}))

    def run_out(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    q, k, v = tensors(batch=4, heads=64, kv_heads=64)
    runtime = fake_runtime(device, tmp_path, pick)
    with current.use(runtime), warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(q, k, v, strict=True)
        enough, runtime._kernels._scratch.get = runtime._kernels._scratch.get, run_out
        assert torch.equal(attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
        with pytest.raises(NoKernel, match="no memory left"):
            attention(q, k, v, strict=True)
        runtime._kernels._scratch.get = enough
        assert near(attention(q, k, v, strict=True), reference(q, k, v)), "the kernel stays in use"
