"""The op in forked children, in processes without a home directory, and in threads that begin together."""

import os
import shutil
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch
import torch.nn.functional as F

from evoattn.backends.platform import find_platform
from evoattn.model import forks
from evoattn.model.paths import ROOT
from evoattn.ops.attention import attention
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import FakeDevice, build, near, reference, tensors, wgmma_pick


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


def test_a_lock_that_another_thread_holds_is_free_in_the_child():
    lock, taken, done = forks.Lock(), threading.Event(), threading.Event()

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
