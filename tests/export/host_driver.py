"""C++ host code of kernels, compiled by g++ into a program that prints the plan of every case it reads."""

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from evoattn.export.host_code import PLAIN, SIZES
from evoattn.model.launch import Buffer, KernelLaunch, Scalar, TensorMap
from evoattn.model.paths import TEMPLATES
from evoattn.model.problem import AttentionProblem

HOST = TEMPLATES / "export"
GXX = shutil.which("g++")

PROGRAM = """
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iostream>
{host}
{kernels}
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
  const decltype(&kernel0::plan) plans[] = {{ {plans} }};
  const decltype(&kernel0::refusal) refusals[] = {{ {refusals} }};
  Problem p{{}};
  int kernel, sm_count;
  while (std::cin >> kernel >> sm_count) {{
    {reads}
    Plan plan_ = plans[kernel](p, sm_count);
    std::printf("{{\\"refused\\": %s, \\"scratch\\": [", refusals[kernel](p, sm_count) ? "true" : "false");
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


def build(kernels: list[str], folder: Path) -> Path:
    """The program of these texts of `host_code`."""
    reads = [f"std::cin >> p.{name};" for name in SIZES]
    reads += [f"std::cin >> p.{t}.{what};" for t in "qkvo" for what in ("batch", "head", "row")]
    reads += ["std::cin >> p.softmax_scale;"]
    source, program = folder / "plans.cpp", folder / "plans"
    text = PROGRAM.format(
        host=(HOST / "host.h").read_text(),
        kernels="\n".join(f"namespace kernel{i} {{\n{code}}}" for i, code in enumerate(kernels)),
        plans=", ".join(f"kernel{i}::plan" for i in range(len(kernels))),
        refusals=", ".join(f"kernel{i}::refusal" for i in range(len(kernels))),
        reads="\n    ".join(reads),
    )
    source.write_text(text)
    subprocess.run([str(GXX), "-std=c++17", "-Wall", "-Werror", str(source), "-o", str(program)], check=True)
    return program


def line(kernel: int, problem: AttentionProblem, sm_count: int) -> str:
    """A case of the kernel of that place as the program reads it."""
    values: list[Any] = [kernel, sm_count, *(getattr(problem, name) for name in SIZES)]
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
