"""Numbers that FlexAttention's functions capture, and the kernels that are made ready for them beside calls."""

import functools
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import evoattn
from evoattn.model.space import KernelConfig
from evoattn.ops import flex
from evoattn.ops.runtime import Runtime, current
from tests.ops.fake_device import FakeDevice, Pick, build, near, tensors, wgmma_pick
from tests.ops.test_flex_mods import by_torch

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def scaled(by):
    return lambda s, b, h, i, j: s * by + i % 3


def answers(q, k, v, score_mod):
    return near(evoattn.flex_attention(q, k, v, score_mod), by_torch(flex.Call(q, k, v), score_mod, None)[0])


def test_without_a_device_torch_is_asked(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(flex, "TORCH", lambda *given, **words: asked.append(given[3]))
    made = [scaled(by) for by in (2, 2, 0.5, 7)]
    with current.use(Runtime(None, wgmma_pick, tmp_path)):
        for score_mod in made:
            evoattn.flex_attention(*tensors(1, 2, 2, 20, 30), score_mod)
    assert asked == made


def test_products_of_numbers_have_no_limit(device):
    q, k, v = tensors(1, 2, 2, 20, 30)
    for a in (1 << 16, 3 << 16, 5 << 16):
        assert answers(q, k, v, lambda s, b, h, i, j, a=a: torch.where(i * 30 + j < a * 65536, s, -s))
        evoattn.settle()


@pytest.mark.parametrize("by", [1 << 63, -(1 << 70)])
def test_a_number_beyond_all_whole_ones_is_no_tensor(by):
    flex.said_by((scaled(by), None), CPU, True)
    assert flex.with_tensors(by, CPU) == by


def test_a_value_that_is_traced_anew_is_no_other_one():
    """As where more functions came between than are kept."""
    first, second = scaled(2.5), scaled(3.5)
    flex._values.clear()
    for score_mod in (first, first, first, second):
        flex._known.clear()
        said, captured = flex.said_by((score_mod, None), CPU)
        assert said.folds and not captured
    flex._known.clear()
    assert flex.said_by((scaled(4.5), None), CPU)[1], "the third value is a tensor"
    assert not flex.said_by((first, None), CPU)[1]


def test_what_has_a_tensor_that_its_key_does_not_know_is_traced_anew():
    table = torch.zeros(8)
    table.grad = torch.ones(8)

    def with_grad(by):
        return lambda s, b, h, i, j: s * by + table.grad[h]

    for by in (2, 2, 3, 3):
        said, captured = flex.said_by((with_grad(by), None), CPU)
        tables = said.traced.tables(captured).values()
        assert any(one.data_ptr() == table.grad.data_ptr() for one in tables)


def _doubled(size):
    return 2 * size if isinstance(size, int) else 1


@pytest.mark.parametrize(
    "by",
    [
        lambda a: lambda s, b, h, i, j: s * a if isinstance(a, int) else s,
        lambda a: lambda s, b, h, i, j: s * _doubled(a),
        lambda a: functools.partial(lambda size, s, b, h, i, j: s * len(str(size)), a),
    ],
)
def test_what_asks_of_which_kind_a_number_is_has_it_as_a_constant(device, by):
    """As of which a tensor of it would be another, without an error."""
    for number in (3, 3, 40, 500):
        assert answers(*tensors(1, 2, 2, 20, 30), by(number))
        evoattn.settle()


def test_an_error_beside_calls_is_raised_by_the_next_one(device, monkeypatch):
    q, k, v = tensors(1, 2, 2, 20, 30)
    runtime, choice, broken = current.runtime(), Runtime.choice, []

    def chosen(self, call, contends=False):
        if call.score is not None and "t0" not in call.score.text:
            broken.append(call)
            raise OSError("no file")
        return choice(self, call, contends)

    monkeypatch.setattr(Runtime, "choice", chosen)
    for _ in range(2):
        assert answers(q, k, v, scaled(2))
        runtime.settle()
    assert broken
    with pytest.raises(OSError, match="no file"):
        evoattn.flex_attention(q, k, v, scaled(2))


def test_what_found_no_room_beside_calls_is_asked_for_again(tmp_path):
    """A kernel whose compiler fails frees the room, and what waits for it comes next."""
    device, may, built = FakeDevice(), threading.Event(), []

    def pick(problem, gpu):
        genes = wgmma_pick(problem, gpu).config.params | {"BLOCK_N": 80}
        return Pick("flash_wgmma", KernelConfig("flash_wgmma", genes))

    def failing(family, problem, config, gpu, folder):
        built.append((problem.score, config["BLOCK_N"]))
        if config["BLOCK_N"] == 80 and "2" in problem.score:
            assert may.wait(20)
            raise OSError("no compiler")
        return build(family, problem, config, gpu, folder)

    q, k, v = tensors(1, 2, 2, 20, 30)
    both = (lambda s, b, h, i, j: s + i % 2), (lambda s, b, h, i, j: s + i % 3)
    with current.use(Runtime(device, pick, tmp_path, build=failing)) as runtime:
        for score_mod in both:
            assert answers(q, k, v, score_mod)
        may.set()
        runtime.settle()
        assert [block for score, block in built if "3" in score] == [64]
        assert answers(q, k, v, both[1])
        runtime.settle()
    assert [block for score, block in built if "3" in score] == [64, 80]


def test_tensors_of_a_call_are_not_kept_while_a_compiler_works(tmp_path):
    began, may = threading.Event(), threading.Event()

    def slow(family, problem, config, gpu, folder):
        if not problem.tables:
            began.set()
            assert may.wait(20)
        return build(family, problem, config, gpu, folder)

    with current.use(Runtime(FakeDevice(), wgmma_pick, tmp_path, build=slow)) as runtime:
        for _ in range(2):
            q, k, v = tensors(1, 2, 2, 20, 30)
            evoattn.flex_attention(q, k, v, scaled(2))
        kept = weakref.ref(q)
        assert began.wait(20)
        del q
        assert kept() is None
        may.set()
        runtime.settle()


def test_a_process_that_ends_begins_no_compiler():
    """And waits for what one has begun, without what comes behind it: compilers crash where the process ends."""
    code = """
        import threading, time
        from types import SimpleNamespace
        from evoattn.ops import kernels

        def build(*_):
            began.set()
            time.sleep(0.5)
            print("built")

        began, choice = threading.Event(), SimpleNamespace(key="key")
        kernels._recipe = lambda _: ()
        kernels.cases_of = kernels.Kernels._was_checked = lambda *_: print("checked")
        for _ in range(2):
            made = kernels.Kernels(None, None, build, lambda: None)
            assert made.beside(lambda: made.make_ready(choice, 0))
            assert began.wait(5)
    """
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert found.stdout.split() == ["built"]


def test_threads_ask_torchs_flexattention_in_turn(monkeypatch):
    """It patches modules while it traces: two at once would read each other's."""
    at_work, most = [], []

    def torchs(*_, **__):
        at_work.append(1)
        most.append(len(at_work))
        time.sleep(0.01)
        at_work.pop()

    monkeypatch.setattr(flex, "TORCH", torchs)
    given = [torch.randn(1, 1, 4, 8) for _ in "qkv"]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: flex.flex_attention(*given, lambda s, b, h, i, j: s), range(3)))
    assert most == [1, 1, 1]
