"""A family's C++ host code, compiled by g++ into a program that prints the plan of every case it reads."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evoattn.export.host_config import host_config
from evoattn.model.launch import Buffer, KernelLaunch, Scalar, TensorMap
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem
from evoattn.model.space import KernelConfig

HOST = TEMPLATES / "export"
PLAIN = ("q", "k", "v", "o", "lse")
SIZES = ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")
GXX = shutil.which("g++")

PROGRAM = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
{host}
{family}
void list(const char* name, const int64_t* values, int n) {{
  std::printf("\\"%s\\": [", name);
  for (int i = 0; i < n; i++) std::printf(i ? ", %lld" : "%lld", (long long)values[i]);
  std::printf("], ");
}}
template <typename T> void field(const char* name, const T* values, int n) {{
  int64_t wide[5];
  for (int i = 0; i < n; i++) wide[i] = values[i];
  list(name, wide, n);
}}
int main() {{
  Config c{{}};
  Problem p{{}};
  int sm_count;
  int64_t x;
  while (std::cin >> sm_count) {{
    {reads}
    Plan plan_ = plan(p, c, sm_count);
    std::printf("{{\\"refused\\": %s, \\"scratch\\": [", plan_.refusal ? "true" : "false");
    for (int i = 0; i < plan_.scratches; i++)
      std::printf("%s[\\"%s\\", %lld, %s]", i ? ", " : "", plan_.scratch[i].name, (long long)plan_.scratch[i].bytes,
                  plan_.scratch[i].starts_zeroed ? "true" : "false");
    std::printf("], \\"launches\\": [");
    for (int i = 0; i < plan_.launches; i++) {{
      const Launch& l = plan_.launch[i];
      std::printf("%s{{\\"kernel\\": \\"%s\\", \\"overlaps\\": %s, \\"smem\\": %d, ", i ? ", " : "", l.kernel,
                  l.overlaps ? "true" : "false", l.smem_bytes);
      list("grid", &l.grid.x, 3), list("block", &l.block.x, 3), list("cluster", &l.cluster.x, 3);
      std::printf("\\"args\\": [");
      for (int j = 0; j < l.count; j++) {{
        const Argument& a = l.args[j];
        std::printf("%s{{", j ? ", " : "");
        if (a.kind == Argument::TENSOR_MAP) {{
          field("shape", a.map.shape, a.map.rank), field("box", a.map.box, a.map.rank);
          field("strides", a.map.strides_bytes, a.map.rank - 1);
          std::printf("\\"dtype\\": %d, \\"buffer\\": %d, ", a.map.dtype, a.map.buffer);
        }}
        std::printf("\\"kind\\": %d, ", int(a.kind));
        std::printf("\\"integer\\": %lld, \\"real\\": %.9g}}", (long long)a.integer, a.real);
      }}
      std::printf("]}}");
    }}
    std::printf("]}}\\n");
  }}
}}
"""


def build(family: str, fields: Iterable[str], folder: Path) -> Path:
    """The program of a family; `fields` are those of its `Config`, in the order of the input."""
    reads = [f"std::cin >> x, c.{name} = x;" for name in fields]
    reads += [f"std::cin >> x, p.{name} = x;" for name in SIZES]
    reads += [f"std::cin >> p.{t}.{what};" for t in "qkvo" for what in ("batch", "head", "row")]
    reads += ["std::cin >> p.softmax_scale;"]
    source = folder / f"{family}.cpp"
    text = PROGRAM.format(
        host=(HOST / "host.h").read_text(), family=(HOST / f"{family}.h").read_text(), reads="\n    ".join(reads)
    )
    source.write_text(text)
    program = folder / family
    subprocess.run([str(GXX), "-std=c++17", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    return program


def line(problem: AttentionProblem, config: KernelConfig, sm_count: int) -> str:
    """A case as the program reads it."""
    values: list[Any] = [sm_count, *(int(value) for value in host_config(problem, config).values())]
    values += [getattr(problem, name) for name in SIZES]
    values += [stride for t in "qkvo" for stride in problem.strides(t)[:3]]
    return " ".join(map(str, [*values, repr(problem.softmax_scale)]))


def run(program: Path, lines: Iterable[str]) -> list[dict[str, Any]]:
    """What the program says of every case."""
    result = subprocess.run([str(program)], input="\n".join(lines), capture_output=True, text=True, check=True)
    return [json.loads(row) for row in result.stdout.splitlines()]


def named_argument(argument: dict[str, Any], scratch: list[str]) -> tuple[Any, ...]:
    """An argument of the program's answer, with the buffer's name: see `python_argument`."""
    buffers = [*PLAIN, *scratch]
    match argument["kind"]:
        case 0 | 1:
            return ("int32", "int64")[argument["kind"]], argument["integer"]
        case 2:
            return "float32", argument["real"]
        case 3:
            return "buffer", buffers[argument["integer"]]
    lists = (tuple(argument[name]) for name in ("shape", "strides", "box"))
    return "map", buffers[argument["buffer"]], argument["dtype"], *lists


def python_argument(argument: Buffer | Scalar | TensorMap) -> tuple[Any, ...]:
    """An argument of `Family.launches` in the same words."""
    import numpy as np

    from evoattn.model.dtype import DTYPES

    if isinstance(argument, Buffer):
        return "buffer", argument.name
    if isinstance(argument, TensorMap):
        assert argument.swizzle_bytes == 128
        code = DTYPES[argument.dtype].tensor_map_code
        return "map", argument.buffer, code, argument.shape, argument.strides_bytes, argument.box
    if argument.ctype == "float32":
        return "float32", float(f"{np.float32(argument.value):.9g}")
    return argument.ctype, argument.value


def python_launch(launch: KernelLaunch) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "overlaps": launch.overlaps,
        "smem": launch.smem_bytes,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "cluster": list(launch.cluster),
        "args": [python_argument(argument) for argument in launch.args],
    }
