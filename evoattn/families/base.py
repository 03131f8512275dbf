"""What a kernel family is: a template, its constants, its launches, and why a config cannot be."""

from __future__ import annotations

import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from evoattn.families.genes import Genes
from evoattn.families.work import LaunchWork
from evoattn.model.forward import MAIN
from evoattn.model.gpu import MAX_GRID_YZ, GpuSpec
from evoattn.model.launch import Buffer, KernelArg, KernelLaunch, Scalar
from evoattn.model.mask import FULL_AND_CAUSAL
from evoattn.model.paths import SEARCH_SPACES, TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig, SearchSpace, Value, read_space, spelling

Params = dict[str, Any]


@dataclass(frozen=True)
class Aim:
    """A problem, a config to change for it, and what it is changed with."""

    problem: AttentionProblem
    params: Params
    space: SearchSpace
    gpu: GpuSpec
    rng: random.Random

    def values(self, gene: str) -> tuple[Any, ...]:
        """The values that a gene can have."""
        return next(p.values for p in self.space.parameters if p.name == gene)


Aimed = Callable[[Aim], Params]
"""Draws values of some genes that suit the problem; empty where it has none to offer."""


MOST_ROWS = (1 << 31) - (1 << 16)
"""Queries or keys of a sequence. Kernels count them in int32, to the end of the last tile of 2^16 rows at most."""


class Family(ABC):
    """One kind of kernel. A family is stateless; `templates/<name>.cu.j2` and `search_spaces/<name>.yaml` belong to it.

    A compiled kernel serves every problem of the same head_dim, dtype and mask: lengths, batch, heads and strides are
    run-time arguments, so one cubin is validated at ragged shapes and timed at the problem's own.

    Among its parameters are `BLOCK_M` and `BLOCK_N`, the queries and the keys of a tile: the interpreter's cases and
    the cost model take their lengths from them. A parameter's name in a sentence of `why_invalid` tells the samplers
    which one to change."""

    name: ClassVar[str]
    summary: ClassVar[str]
    """One line for `evoattn families`."""
    devices: ClassVar[str]
    """The GPUs that it runs on, in words, e.g. `any GPU` or `sm_80 and newer`; `evoattn export` reads the least `sm_XX`
    out of them."""
    operations: ClassVar[tuple[str, ...]] = ("forward",)
    """Those that it computes, by their names in `model/operation.py`."""
    genes: ClassVar[type[Genes]]
    """The class that declares its parameters."""
    templates: ClassVar[Path] = TEMPLATES
    """The folder of its template."""
    search_spaces: ClassVar[Path] = SEARCH_SPACES
    """The folder of the file of its known-good configs."""
    dtypes: ClassVar[tuple[str, ...]] = ("fp16", "bf16")
    """Those that it serves, by their names in `model/dtype.py`."""
    masks: ClassVar[tuple[str, ...]] = FULL_AND_CAUSAL
    """Those that it serves, by their names in `model/mask.py`: a mask that is new there is refused until it stands
    here."""
    writes_lse: ClassVar[bool] = False
    """Whether it writes the log-sum-exp where the problem asks for it."""
    variants: ClassVar[tuple[str, ...]] = ()
    """The fields of `model/variant.py` that it serves."""
    plain: ClassVar[bool] = True
    """Whether it serves attention of 16 or 32 bits without any of them."""
    heads_are_rows: ClassVar[bool] = False
    """Whether the BLOCK_M rows of a tile are heads of one query, whatever the config."""
    aims: ClassVar[tuple[Aimed, ...] | None] = None
    """What searches of several problems aim at a problem, if they draw most of their proposals for this family where it
    serves; None where they do not."""
    known_for_lists: ClassVar[bool] = False
    """Whether picks for a block list look at its starting configs too: few of the tiles that were timed on other
    problems divide the blocks of a list."""
    soon_compiled: ClassVar[Mapping[str, Value]] = {}
    """Values of parameters with which a kernel has little code, where compilers take over a second without them: a call
    that waits for a compiler gets such a kernel first. Numbers are the most that it has."""
    weighed_as: ClassVar[str] = ""
    """The family whose weights of the cost model it is given, until it has a fit of its own."""

    def why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        """One sentence if no config of this family can serve the problem on this GPU, else None."""
        if problem.op not in self.operations:
            return f"{self.name} computes {_listed(self.operations)}, not {problem.op}."
        if problem.dtype not in self.dtypes:
            return f"{self.name} takes {_listed(self.dtypes)}, not {problem.dtype}."
        if problem.mask not in self.masks:
            return f"{self.name} takes the masks {_listed(self.masks)}, not {problem.mask}."
        if foreign := tuple(name for name in problem.variants if name not in self.variants):
            them = "it" if len(foreign) == 1 else "them"
            return f"{self.name} does not serve {_listed(foreign)}; take {them} out of the shape, or another family."
        if max(problem.seqlen_q, problem.seqlen_k) > MOST_ROWS:
            return f"{self.name} takes at most {MOST_ROWS} queries and keys, which its kernels count in int32."
        if reason := self.refuse(problem, gpu):
            return reason
        if problem.batch_invariant and not self.recipe(problem, gpu):
            return f"{self.name} has no recipe for rows of the same bits in every batch of such a problem."
        if problem.lse and not self.writes_lse:
            return f"{self.name} does not write the log-sum-exp; take lse=1 out of the shape, or another family."
        return None

    _latest: tuple[object, object, str | None] = None, None, None
    """The problem and GPU of the latest `why_unsupported`, and what it said."""

    def _why_unsupported(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        """`why_unsupported`, asked once for all configs in a row of one problem: that saves a tenth of a pick."""
        latest = self._latest
        if latest[0] is not problem or latest[1] is not gpu:
            self._latest = latest = problem, gpu, self.why_unsupported(problem, gpu)
        return latest[2]

    def __reduce__(self) -> tuple[type[Family], tuple[()]]:
        """A worker gets no more than its class."""
        return type(self), ()

    def may_win(self, problem: AttentionProblem) -> bool:
        """Whether it may be the fastest for a problem that it serves, by what was measured so far. Searches of several
        problems spend their time on families that may, or, where none does, on all that serve a problem."""
        return True

    def why_too_old(self, gpu: GpuSpec, needs: str = "mma.m16n8k16 and cp.async") -> str | None:
        """One sentence if the card is older than Ampere, which has what the family `needs`."""
        too_old = gpu.capability < (8, 0)
        return f"{self.name} needs {needs} of sm_80 and newer, and {gpu.name} is {gpu.arch}." if too_old else None

    def why_no_head_dim(self, least: int, most: int, *dims: int) -> str | None:
        """One sentence if one of the head_dims is smaller or larger."""
        others = [dim for dim in dims if not least <= dim <= most]
        return f"{self.name} takes a head_dim of {least} to {most}, not {others[0]}." if others else None

    def why_past_grid(self, count: int, what: str = "heads and batches") -> str | None:
        """One sentence if a grid's y or z has not so many places."""
        past = count > MAX_GRID_YZ
        return f"{self.name} takes at most {MAX_GRID_YZ} {what} (grid y and z), not {count}." if past else None

    @abstractmethod
    def refuse(self, problem: AttentionProblem, gpu: GpuSpec) -> str | None:
        """One sentence if the shape or the GPU is not for this family, else None; part of `why_unsupported`."""

    def why_invalid(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        """One sentence if this config cannot be, else None. All that is knowable before compiling is said here."""
        return (
            self._why_unsupported(problem, gpu)
            or self.why_other_bits(problem, config, gpu)
            or self.why_not(problem, config, gpu)
        )

    def why_impossible(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        """One sentence if this config cannot serve the problem, else None: `why_invalid` without what is merely
        redundant there.

        A search passes over a config that does on its problem what a smaller one does. A kernel that was found for
        another problem may run it all the same: every kernel passes a set of small problems, on which most of its
        genes are redundant."""
        return (
            self._why_unsupported(problem, gpu)
            or self.why_other_bits(problem, config, gpu)
            or self.why_not(problem, config, gpu, redundant=False)
        )

    @abstractmethod
    def why_not(
        self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec, redundant: bool = True
    ) -> str | None:
        """One sentence if this config cannot be for a problem that the family serves, or, with `redundant`, does there
        what a smaller one does; else None."""

    def why_too_long(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        """One sentence if the lengths are more than a kernel of this config counts, or more blocks wait for one another
        than run at once, else None; part of `why_not`. Exported code asks it of every call, as it asks `refuse`."""
        return None

    @abstractmethod
    def constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        """What the template names beside what it takes as it is (`all_constants`).

        Depends on head_dim, dtype, mask, `lse` and on which `variants` there are alone of the problem, and on the
        architecture alone of the GPU: the number of SMs changes launches, never a source."""

    def all_constants(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, Any]:
        """Everything that the template may see: of what every kernel is told and of the genes what it names, and
        `constants`, which may say otherwise."""
        names = _names_in(self.templates, f"{self.name}.cu.j2")
        dims = {"HEAD_DIM": problem.head_dim, "VALUE_DIM": problem.head_dim_v}
        told = {"ELEMENT": problem.element.cuda, "WRITE_LSE": problem.lse, **dims, **problem.masking.constants()}
        told |= vars(self.genes.of(config))
        return {name: value for name, value in told.items() if name in names} | self.constants(problem, config, gpu)

    def why_outdated(self, config: KernelConfig, source: str) -> str | None:
        """One sentence if a recorded source of this config is of an older version whose kernels today's `launches` do
        not fit, else None. Such a kernel could be wrong, or wait without end."""
        if all(f"constexpr bool {name} = true;" in source for name in ("VARLEN", "PAGED")) and KEYS_USED not in source:
            return (
                "It reads where the keys of packed sequences in pages begin, as an older evoattn told kernels; today's "
                "launches say how many there are."
            )
        if ALL_GIVEN in source:
            return "It takes the arguments of all variants, as an older evoattn gave them; today's launches have less."
        if all(text in source for text in BITS_BY_KEY):
            return "It keeps bits of a block list where the keys lie, and today's launches may have room for fewer."
        return None

    @abstractmethod
    def launches(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> tuple[KernelLaunch, ...]:
        """One to three launches, in order.

        A block that waits for another block of its launch needs it resident: such a grid is one wave of `gpu.sm_count`
        SMs at most."""

    def workspace(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> dict[str, int]:
        """Named scratch buffers in bytes; empty for a single-pass kernel.

        They hold anything when a launch begins, but those whose names end in `ZEROED_SUFFIX` hold zeros before the
        first launch, and the kernels must leave zeros in them: they are not cleared between launches."""
        return {}

    def unordered(self, problem: AttentionProblem, config: KernelConfig) -> tuple[str, ...]:
        """The outputs whose bits may differ from run to run, since blocks add to them in the order in which they happen
        to run. They are judged in each run; all others are compared bit for bit. Empty where the problem is
        `deterministic`."""
        return ()

    def recipe(self, problem: AttentionProblem, gpu: GpuSpec) -> Mapping[str, Value]:
        """The value of each gene on which the bits of a row depend that all kernels of `batch_invariant` have; empty
        where the family leaves such problems to another one, or serves none.

        Which family has one depends on head_dims, dtype and architecture alone. Values that depend on lengths too make
        the same bits of each row that both serve."""
        return {}

    def over_eight_bits(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> KernelConfig | None:
        """What is often fast for a problem over a cache of 8 bits where the config is over one of 16; None where
        nothing is known."""
        return None

    def whole_space(self, gpu: GpuSpec) -> SearchSpace:
        """`registry.load_space`."""
        here, everywhere = self.genes.parameters(gpu.arch), self.genes.parameters()
        return read_space(self.name, here, everywhere, self.search_spaces)

    def space(self, problem: AttentionProblem, gpu: GpuSpec) -> SearchSpace:
        """What a search of the problem may choose from: genes of a recipe have its values alone."""
        whole = self.whole_space(gpu)
        if not problem.batch_invariant:
            return whole
        return whole.restricted({name: (spelling(value),) for name, value in self.recipe(problem, gpu).items()})

    def row_bits(self, problem: AttentionProblem, config: KernelConfig) -> tuple[Value, ...] | None:
        """What the bits of a row's answer and log-sum-exp depend on beside its own query, its keys and values,
        head_dims, dtype, mask, scale and variants: the genes of `recipe`. None where they also depend on other rows, on
        lengths or on how many SMs there are."""
        return None

    def why_other_bits(self, problem: AttentionProblem, config: KernelConfig, gpu: GpuSpec) -> str | None:
        """One sentence if the problem is `batch_invariant` and the config's bits are not those of the recipe."""
        if not problem.batch_invariant:
            return None
        recipe = self.recipe(problem, gpu)
        bits = self.row_bits(problem, config)
        if bits == tuple(recipe.values()):
            return None
        wanted = " ".join(f"{name}={value}" for name, value in recipe.items())
        if bits is None:
            return f"batch_invariant asks for {wanted}; here a row's bits depend on what is around it, too."
        return f"batch_invariant asks for {wanted}, on which the bits of a row depend."

    @abstractmethod
    def work(self, problem: AttentionProblem, config: KernelConfig, registers: int = 0) -> tuple[LaunchWork, ...]:
        """What each launch has to do, in closed forms (`families/work.py`): of this the cost model makes a time.

        `registers` are per thread; 0, where it was not compiled yet, stands for the family's own estimate."""


@cache
def _names_in(folder: Path, template: str) -> frozenset[str]:
    """The words of the `{{ … }}` and `{% … %}` of a template and of those that it includes."""
    said = re.findall(r"\{[{%].*?[%}]\}", (folder / template).read_text(encoding="utf-8"))
    included = (match[1] for text in said if (match := re.search(r'include "(.+)"', text)))
    return frozenset(re.findall(r"\w+", " ".join(said))).union(*(_names_in(folder, name) for name in included))


def _listed(words: tuple[str, ...]) -> str:
    """E.g. `fp16, bf16 and fp32`."""
    return " and ".join((", ".join(words[:-1]), words[-1])) if len(words) > 1 else words[0]


KEYS_USED = "keys_used"
"""In kernels that serve packed sequences in pages, and in no older ones."""
ALL_GIVEN = "int total_queries, int sequences OWN_SCORE_PARAMETERS"
"""In older kernels for variants, which took what any variant needs."""
BITS_BY_KEY = "PACK_MASK_KERNEL(Terms, false)", "bits_row_words + first_key / 32"
"""In older kernels for block lists that read bits."""
ZEROED_SUFFIX = "_zeroed"


def starts_zeroed(buffer: str) -> bool:
    """Whether the scratch buffer of that name holds zeros before the first launch and after every one (see
    `Family.workspace`)."""
    return buffer.endswith(ZEROED_SUFFIX)


def softmax_scale_log2(problem: AttentionProblem) -> Scalar:
    """softmax_scale · log2(e), float32: kernels take exponentials base 2, `exp(x) = exp2(x · log2 e)`.

    With a softcap it is softcap · log2(e): what the kernel scales then is a hyperbolic tangent."""
    return Scalar("float32", (problem.softcap or problem.softmax_scale) * math.log2(math.e))


def buffer_of(problem: AttentionProblem, tensor: str) -> str:
    """The name of the buffer in which `q`, `k`, `v` or `o` lies: V may be a part of K."""
    return "k" if tensor == "v" and problem.shared_kv else tensor


def attention_args(problem: AttentionProblem) -> tuple[KernelArg, ...]:
    """The arguments that every fused forward kernel takes, in this order:

    `q, k, v, o` (pointers), `heads, kv_heads, seqlen_q, seqlen_k` (int32), the batch, head and row strides of q, k, v,
    o in elements (twelve int64), `softmax_scale_log2` (float32)."""
    args: list[KernelArg] = [Buffer(buffer_of(problem, t)) for t in MAIN]
    args += [Scalar("int32", n) for n in (problem.heads, problem.kv_heads, problem.seqlen_q, problem.seqlen_k)]
    args += [Scalar("int64", stride) for t in MAIN for stride in problem.strides(t)[:3]]
    args.append(softmax_scale_log2(problem))
    return tuple(args)
