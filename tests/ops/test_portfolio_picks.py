"""What the shipped portfolio picks can be launched by the op: the kernels of 150 drawn problems, of any family."""

from fake_device import FakeDevice, build

from evoattn.model.gpu import GPUS
from evoattn.ops.choice import Choice, choose
from evoattn.ops.explain import strided
from evoattn.ops.kernel import TENSORS, LoadedKernel, scratch_places
from evoattn.portfolio.pick import pick
from evoattn.portfolio.workload import draw

SEED, COUNT = 4711, 150
ADDRESSES = tuple(4096 << i for i in range(len(TENSORS) + 2))


def test_every_pick_can_be_packed_and_takes_the_callers_scale():
    device, families = FakeDevice(), set()
    for problem in draw(SEED, COUNT):
        choice = choose(strided(problem), GPUS["h100"], pick, estimated=False)
        assert isinstance(choice, Choice), choice.reason
        families.add(choice.family.name)
        scaled, usual = choice.launches(0.5), choice.launches(None)
        changed = [
            (mine, theirs)
            for one, other in zip(scaled, usual, strict=True)
            for mine, theirs in zip(one.args, other.args, strict=True)
            if mine != theirs
        ]
        assert len(changed) == 1, "one argument is the scale"
        places, scratch, zeroed = scratch_places(choice.family.workspace(choice.problem, choice.config, choice.gpu))
        assert all(0 <= offset < (scratch, zeroed)[index - len(TENSORS)] for index, offset in places.values())
        places |= {name: (index, 0) for index, name in enumerate(TENSORS)}
        cubin = build(choice.family, problem, choice.config, choice.gpu, None)
        for packed in LoadedKernel(cubin.code, device, -1).pack(scaled, places):
            packed.bind(ADDRESSES)
    assert {"flash_wgmma", "split_kv"} <= families
