"""A change that makes all decisions void counts for those too that another thread is making at that moment."""

import threading
from types import SimpleNamespace

import pytest
import torch

from evoattn.integrations.static_cache import kernel_serves
from evoattn.ops.attention import attention
from evoattn.ops.explain import explain
from evoattn.ops.runtime import Runtime, current
from evoattn.ops.sdpa import disable, enable
from evoattn.ops.torch_answer import NoKernel
from tests.ops.fake_device import Pick, build, fake_runtime, near, reference, tensors, wgmma_pick


class Pause:
    """Holds a thread up within `work` until `done` is over."""

    def __init__(self, work):
        self._work, self._begun, self._go = work, threading.Event(), threading.Event()

    def __call__(self, *arguments):
        self._begun.set()
        assert self._go.wait(200)
        return self._work(*arguments)

    def during(self, call, change):
        """What `call`, in a thread of its own, answers where `change` is made while it waits."""
        answers = []
        thread = threading.Thread(target=lambda: answers.append(call()))
        thread.start()
        try:
            assert self._begun.wait(200)
            change()
        finally:
            self._go.set()
            thread.join()
        return answers[0]


@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=["plain", "variant"])
def test_kernels_that_are_forbidden_while_one_is_compiled_run_no_more(device, tmp_path, words):
    def pick(problem, gpu):
        return Pick("flash_wgmma", wgmma_pick(problem, gpu).config, "of another card", estimated=True)

    q, k, v = tensors()
    compiling = Pause(build)
    with current.use(Runtime(device, pick, tmp_path, build=compiling)):
        enable(estimated=True)
        try:
            compiling.during(lambda: attention(q, k, v, enable_gqa=True, **words), disable)
        finally:
            disable()
        assert "measured on no h100" in explain(q, k, v, enable_gqa=True, **words)
        with pytest.raises(NoKernel, match="measured on no h100"):
            attention(q, k, v, enable_gqa=True, strict=True, **words)


@pytest.mark.parametrize("words", [{}, {"window": (9, 0)}], ids=["plain", "variant"])
def test_a_kernel_that_fails_while_another_call_of_it_is_prepared_runs_no_more(device, tmp_path, words):
    q, k, v = tensors()
    other = q[:, :, :9].contiguous()
    with current.use(fake_runtime(device, tmp_path)) as runtime:
        attention(q, k, v, enable_gqa=True, strict=True, **words)
        (kernel,) = runtime._kernels._loaded.values()
        packing = kernel.bound = Pause(kernel.bound)

        def fail():
            device.status = 719
            with pytest.warns(RuntimeWarning, match="fake error 719; the kernel is not used again"):
                attention(q, k, v, enable_gqa=True, **words)
            device.status = 0

        before = len(device.launches)
        answer = packing.during(lambda: attention(other, k, v, enable_gqa=True, **words), fail)
        if not words:
            assert near(answer, reference(other, k, v))
        with pytest.raises(NoKernel, match="fake error 719"):
            attention(other, k, v, enable_gqa=True, strict=True, **words)
        assert len(device.launches) == before


def test_whether_a_kernel_serves_a_step_is_asked_again(device, tmp_path):
    asked, model = [], SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=256)

    def pick(problem, gpu):
        asked.append(problem)
        runtime.forget()  # as another thread may at this moment

    with current.use(fake_runtime(device, tmp_path, pick)) as runtime:
        for _ in range(2):
            assert not kernel_serves(model, 2, 1, 64, torch.float16, torch.device("cpu"))
    assert len(asked) == 2
