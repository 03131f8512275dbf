"""The one generated piece of CUDA: a `wgmma` with an operand for each accumulator, which C++ has no way to repeat; one
alone, and all those of a product."""

from typing import NamedTuple

from evoattn.model.dtype import DTYPES

PTX_TYPES = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3", "e5m2": "e5m2"}
OPERANDS_A_LINE = 8


class EightBits(NamedTuple):
    """What a product of 8 bits is of, in place of a dtype."""

    dtype: str
    b_dtype: str = ""
    """Of B, where it is another."""
    pairs: bool = False
    """Accumulators are pairs of fp16, else fp32."""


def _lines(items: list[str], indent: str) -> str:
    """`items` with commas, OPERANDS_A_LINE a line."""
    rows = (", ".join(items[i : i + OPERANDS_A_LINE]) for i in range(0, len(items), OPERANDS_A_LINE))
    return f",\n{indent}".join(rows)


def _string_lines(items: list[str], indent: str) -> str:
    """`items` with commas as adjacent C++ string literals, OPERANDS_A_LINE a line."""
    rows = [", ".join(items[i : i + OPERANDS_A_LINE]) for i in range(0, len(items), OPERANDS_A_LINE)]
    return f'"\n{indent}"'.join(f"{row}, " if row is not rows[-1] else row for row in rows)


def wgmma_function(
    name: str,
    columns: int,
    dtype: str | EightBits,
    a_in_registers: bool,
    b_transposed: bool,
    a_transposed: bool = False,
) -> str:
    """A C++ function `name(d, a, b, accumulate)`: D[64, columns] = A[64, 16] B[16, columns], of 8 bits 32 in place of
    16, added to D if `accumulate`; sums in fp32, or in pairs of fp16.

    `d` is the lane's columns / 2 accumulators, or half as many pairs, `a` four registers or a descriptor, `b` a
    descriptor; `a_transposed` says that A lies with its rows contiguous, `b_transposed` B with its columns (PTX ISA,
    wgmma.mma_async). `columns` is a multiple of 8 up to 256, `dtype` `fp16`, `bf16`, `e4m3`, `e5m2` or `EightBits`.
    Raises `ValueError` for A transposed in registers, and for 8 bits transposed."""
    if a_in_registers and a_transposed:
        raise ValueError("wgmma transposes no A that lies in registers.")
    dtype, b_dtype, pairs = dtype if isinstance(dtype, EightBits) else EightBits(dtype)
    if DTYPES[dtype].bytes == 1 and (a_transposed or b_transposed):
        raise ValueError("wgmma transposes no operand of 8 bits.")
    count = columns // (4 if pairs else 2)
    kind, sums, place = ("uint32_t", "f16", "+r") if pairs else ("float", "f32", "+f")
    ptx, of_b = PTX_TYPES[dtype], PTX_TYPES[b_dtype or dtype]
    a_operands = [f"%{count + i}" for i in range(4)] if a_in_registers else [f"%{count}"]
    b, accumulate = (f"%{count + len(a_operands) + i}" for i in range(2))
    a_text = "{" + ", ".join(a_operands) + "}" if a_in_registers else a_operands[0]
    transposed = [] if DTYPES[dtype].bytes == 1 else [b_transposed] if a_in_registers else [a_transposed, b_transposed]
    flags = ", ".join(["p, 1, 1", *(str(int(flag)) for flag in transposed)])
    a_type = "const uint32_t (&a)[4]" if a_in_registers else "uint64_t a"
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'
    accumulators = [f"%{i}" for i in range(count)]
    outputs = [f'"{place}"(d[{i}])' for i in range(count)]
    indent = " " * 15
    return f"""\
__device__ __forceinline__ void {name}({kind} (&d)[{count}], {a_type}, uint64_t b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {accumulate}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k{DTYPES[dtype].mma_k}.{sums}.{ptx}.{of_b} "
               "{{{_string_lines(accumulators, indent)}}}, "
               "{a_text}, {b}, {flags};\\n}}"
               : {_lines(outputs, indent + "  ")}
               : {a_inputs}, "l"(b), "r"(accumulate));
}}"""


def wgmma_product(
    name: str,
    steps: int,
    columns: int,
    dtype: str | EightBits,
    a_in_registers: bool,
    b_transposed: bool,
    first_step: int = 0,
) -> str:
    """A C++ function `name(d, a, b, accumulate)` of `steps` such products, which all add to the same D: `a[step]` and
    `b(step)` are their operands, A has its columns contiguous; before the first D is 0 unless `accumulate`.
    Those of A in registers begin with `first_step`; those before it come last.

    Of A in registers it is one asm statement, of which NVRTC makes the same machine code as of one for each step, in
    less time; where descriptors are computed for both operands it makes another one, 1 % slower at head_dim 256."""
    of_step, (dtype, b_dtype, pairs) = dtype, dtype if isinstance(dtype, EightBits) else EightBits(dtype)
    count = columns // (4 if pairs else 2)
    kind, sums, place = ("uint32_t", "f16", "+r") if pairs else ("float", "f32", "+f")
    head = f"""\
template <class A, class B>
__device__ __forceinline__ void {name}({kind} (&d)[{count}], const A& a, const B& b, int accumulate) {{"""
    if not a_in_registers:
        one = wgmma_function(f"{name}_step", columns, of_step, False, b_transposed)
        return f"""\
{one}
{head}
#pragma unroll
  for (int step = 0; step < {steps}; ++step) {name}_step(d, a[step], b(step), accumulate || step > 0);
}}"""
    ptx, of_b, indent = PTX_TYPES[dtype], PTX_TYPES[b_dtype or dtype], " " * 15
    flags = ", ".join(["1, 1", *[str(int(b_transposed))] * (DTYPES[dtype].bytes > 1)])
    d = _string_lines([f"%{i}" for i in range(count)], indent)
    given = f"%{count + 5 * steps}"
    lines, inputs = list[str](), list[str]()
    for nth, step in enumerate((*range(first_step, steps), *range(first_step))):
        first = count + 5 * nth
        a = ", ".join(f"%{first + i}" for i in range(4))
        lines.append(
            f'"wgmma.mma_async.sync.aligned.m64n{columns}k{DTYPES[dtype].mma_k}.{sums}.{ptx}.{of_b} "\n{indent}'
            f'"{{{d}}}, "\n{indent}"{{{a}}}, %{first + 4}, {"always" if nth else "p"}, {flags};\\n"'
        )
        inputs += [*(f'"r"(a[{step}][{i}])' for i in range(4)), f'"l"(b({step}))']
    outputs = _lines([f'"{place}"(d[{i}])' for i in range(count)], indent + "  ")
    return f"""\
{head}
  asm volatile("{{\\n.reg .pred p, always;\\nsetp.ne.b32 p, {given}, 0;\\nsetp.eq.b32 always, {given}, {given};\\n"
               {f"{chr(10)}{indent}".join(lines)}
               "}}"
               : {outputs}
               : {_lines([*inputs, '"r"(accumulate)'], indent + "  ")});
}}"""
