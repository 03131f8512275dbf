"""The one generated piece of CUDA: a `wgmma` with an operand for each accumulator, which C++ has no way to repeat; one
alone, and all those of a product."""

from evoattn.model.dtype import DTYPES

PTX_TYPES = {"fp16": "f16", "bf16": "bf16", "e4m3": "e4m3", "e5m2": "e5m2"}
OPERANDS_A_LINE = 8


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
    dtype: str,
    a_in_registers: bool,
    b_transposed: bool,
    a_transposed: bool = False,
    b_dtype: str = "",
) -> str:
    """A C++ function `name(d, a, b, accumulate)`: D[64, columns] = A[64, 16] B[16, columns], of 8 bits 32 in place of
    16, added to D if `accumulate`; fp32 accumulators.

    `d` is the lane's columns / 2 accumulators, `a` four registers or a descriptor, `b` a descriptor; `a_transposed`
    says that A lies with its rows contiguous, `b_transposed` B with its columns (PTX ISA, wgmma.mma_async). `columns`
    is a multiple of 8 up to 256, `dtype` `fp16`, `bf16`, `e4m3` or `e5m2`; of 8 bits B may have
    another, `b_dtype`. Raises `ValueError` for A transposed in registers, and for 8 bits transposed.
    """
    if a_in_registers and a_transposed:
        raise ValueError("wgmma transposes no A that lies in registers.")
    if DTYPES[dtype].bytes == 1 and (a_transposed or b_transposed):
        raise ValueError("wgmma transposes no operand of 8 bits.")
    count = columns // 2
    ptx, of_b = PTX_TYPES[dtype], PTX_TYPES[b_dtype or dtype]
    a_operands = [f"%{count + i}" for i in range(4)] if a_in_registers else [f"%{count}"]
    b, accumulate = (f"%{count + len(a_operands) + i}" for i in range(2))
    a_text = "{" + ", ".join(a_operands) + "}" if a_in_registers else a_operands[0]
    transposed = [] if DTYPES[dtype].bytes == 1 else [b_transposed] if a_in_registers else [a_transposed, b_transposed]
    flags = ", ".join(["p, 1, 1", *(str(int(flag)) for flag in transposed)])
    a_type = "const uint32_t (&a)[4]" if a_in_registers else "uint64_t a"
    a_inputs = ", ".join(f'"r"(a[{i}])' for i in range(4)) if a_in_registers else '"l"(a)'
    accumulators = [f"%{i}" for i in range(count)]
    outputs = [f'"+f"(d[{i}])' for i in range(count)]
    indent = " " * 15
    return f"""\
__device__ __forceinline__ void {name}(float (&d)[{count}], {a_type}, uint64_t b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {accumulate}, 0;\\n"
               "wgmma.mma_async.sync.aligned.m64n{columns}k{DTYPES[dtype].mma_k}.f32.{ptx}.{of_b} "
               "{{{_string_lines(accumulators, indent)}}}, "
               "{a_text}, {b}, {flags};\\n}}"
               : {_lines(outputs, indent + "  ")}
               : {a_inputs}, "l"(b), "r"(accumulate));
}}"""


def wgmma_product(
    name: str, steps: int, columns: int, dtype: str, a_in_registers: bool, b_transposed: bool, b_dtype: str = ""
) -> str:
    """A C++ function `name(d, a, b, accumulate)` of `steps` such products, which all add to the same D: `a[step]` and
    `b(step)` are their operands, of A with its columns contiguous; before the first D is 0 unless `accumulate`.

    In one asm statement: NVRTC makes the same machine code of it as of one for each step, in four fifths of the time.
    """
    count, ptx, of_b = columns // 2, PTX_TYPES[dtype], PTX_TYPES[b_dtype or dtype]
    width = 4 if a_in_registers else 1
    places = [count + step * (width + 1) for step in range(steps)]
    transposed = [] if DTYPES[dtype].bytes == 1 else [b_transposed] if a_in_registers else [False, b_transposed]
    flags = ", ".join(["1, 1", *(str(int(flag)) for flag in transposed)])
    indent = " " * 15
    d = _string_lines([f"%{i}" for i in range(count)], indent)
    lines, inputs = [], []
    for step, place in enumerate(places):
        a = ", ".join(f"%{place + i}" for i in range(width))
        of_step = "{" + a + "}" if a_in_registers else a
        added = "always" if step else "p"
        lines.append(
            f'"wgmma.mma_async.sync.aligned.m64n{columns}k{DTYPES[dtype].mma_k}.f32.{ptx}.{of_b} "\n{indent}'
            f'"{{{d}}}, "\n{indent}"{of_step}, %{place + width}, {added}, {flags};\\n"'
        )
        inputs += [f'"r"(a[{step}][{i}])' for i in range(4)] if a_in_registers else [f'"l"(a[{step}])']
        inputs.append(f'"l"(b({step}))')
    given = f"%{count + steps * (width + 1)}"
    outputs = _lines([f'"+f"(d[{i}])' for i in range(count)], indent + "  ")
    return f"""\
template <class A, class B>
__device__ __forceinline__ void {name}(float (&d)[{count}], const A& a, const B& b, int accumulate) {{
  asm volatile("{{\\n.reg .pred p, always;\\nsetp.ne.b32 p, {given}, 0;\\nsetp.eq.b32 always, {given}, {given};\\n"
               {f"{chr(10)}{indent}".join(lines)}
               "}}"
               : {outputs}
               : {_lines([*inputs, '"r"(accumulate)'], indent + "  ")});
}}"""
