"""Logic, shifts and bit fields."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from evoattn.ptx.errors import unsupported
from evoattn.ptx.isa.dispatch import Fields, Operation, instruction
from evoattn.ptx.isa.integer import operands
from evoattn.ptx.program.kernel import UNSIGNED, Instruction, Lanes, PtxType, parse_type, vector_parts
from evoattn.ptx.state.registers import Binder

_LOGIC = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_U32 = parse_type("u32")


@instruction("and or xor", r"\.(?P<type>pred|b16|b32|b64)", kind="int")
def logic(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, b, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(_LOGIC[fields["op"]], a, b, d)


@instruction("not", r"\.(?P<type>pred|b16|b32|b64)", kind="int")
def invert(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, d = operands(binder, ins, parse_type(fields["type"]))
    return partial(np.invert, a, d)


@instruction("cnot", r"\.(?P<type>b16|b32|b64)", kind="int")
def logical_not(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    a, d = operands(binder, ins, parse_type(fields["type"]))
    return lambda: np.copyto(d, a == 0)


@instruction("shl shr", r"\.(?P<type>[bus](?:16|32|64))", kind="int")
def shift(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """A distance of the width or more gives 0, or for `shr.s` the sign in every bit; NumPy's shifts do the same."""
    kind = parse_type(fields["type"])
    if fields["op"] == "shl" and kind.kind != "b":
        raise unsupported(ins, "shl takes a .b type")
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], kind)
    distance = binder.source(ins.operands[2], _U32)
    ufunc = np.left_shift if fields["op"] == "shl" else np.right_shift
    if distance.ndim == 0:
        return partial(ufunc, a, np.asarray(min(int(distance), kind.bits), kind.dtype), d)
    limit = np.uint32(kind.bits)
    return lambda: ufunc(a, np.minimum(distance, limit).astype(kind.dtype), d)


@instruction("shf", r"\.(?P<direction>l|r)\.(?P<mode>wrap|clamp)\.b32", kind="int")
def funnel_shift(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    low, high, distance, d = operands(binder, ins, _U32)
    wrap = fields["mode"] == "wrap"

    def run() -> None:
        n = (distance & np.uint32(31) if wrap else np.minimum(distance, np.uint32(32))).astype(np.uint64)
        both = (high.astype(np.uint64) << np.uint64(32)) | low
        both = (both << n) >> np.uint64(32) if fields["direction"] == "l" else both >> n
        np.copyto(d, both, casting="unsafe")

    return run


@instruction("bfe", r"\.(?P<type>[us](?:32|64))", kind="int")
def extract_field(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Bits `position` … `position + length - 1`; `.s` extends the field's top bit, or the register's if the field
    reaches beyond it."""
    kind = parse_type(fields["type"])
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], kind)
    place = _field_place(binder, ins.operands[2:4], kind.bits)
    bits, word = kind.bits, UNSIGNED[kind.bits].type

    def run() -> None:
        start, count = place()
        field = (a.view(word) >> np.minimum(start, bits).astype(word)) & _ones(count, word)
        if kind.kind == "s":
            top = np.minimum(start + count - 1, bits - 1)
            sign = ((a.view(word) >> np.maximum(top, 0).astype(word)) & word(1)).astype(np.bool_) & (count > 0)
            reach = np.minimum(count, np.maximum(bits - start, 0))
            field = np.where(sign, field | ~_ones(reach, word), field)
        np.copyto(d.view(word), field)

    return run


def _field_place(binder: Binder, operands: Sequence[str], bits: int) -> Callable[[], tuple[Lanes, Lanes]]:
    """Reads a field's position and length, int64. Of words of 32 bits they are taken modulo 256, as the PTX ISA says;
    of 64 bits an H100 takes them whole."""
    mask = np.uint32(255 if bits == 32 else 0xFFFFFFFF)
    position, length = (binder.source(o, _U32) for o in operands)
    return lambda: ((position & mask).astype(np.int64), (length & mask).astype(np.int64))


def _ones(count: Lanes, word: type) -> Lanes:
    """Numbers whose `count` low bits are set."""
    bits = np.dtype(word).itemsize * 8
    ones: Lanes = np.where(
        count >= bits, word(-1 & (2**bits - 1)), (word(1) << np.minimum(count, bits).astype(word)) - word(1)
    )
    return ones


@instruction("bfi", r"\.(?P<type>b32|b64)", kind="int")
def insert_field(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    a, b, d = (*(binder.source(o, kind) for o in ins.operands[1:3]), binder.destination(ins.operands[0], kind))
    place, word = _field_place(binder, ins.operands[3:5], kind.bits), kind.dtype.type

    def run() -> None:
        start, count = place()
        start = np.minimum(start, kind.bits).astype(word)
        mask = _ones(count, word) << start
        np.copyto(d, (b & ~mask) | ((a << start) & mask))

    return run


@instruction("bmsk", r"\.(?P<mode>clamp|wrap)\.b32", kind="int")
def bit_mask(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    start, length, d = operands(binder, ins, _U32)

    def limit(x: Lanes) -> Lanes:
        result: Lanes = np.minimum(x, np.uint32(32)) if fields["mode"] == "clamp" else x & np.uint32(31)
        return result

    return lambda: np.copyto(d, _ones(limit(length).astype(np.int64), np.uint32) << limit(start))


@instruction("popc clz bfind", r"\.(?P<type>b32|b64|u32|u64)", kind="int")
def count_bits(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    if (kind.kind == "u") != (fields["op"] == "bfind"):
        raise unsupported(ins, "the type does not fit the opcode")
    a, d = binder.source(ins.operands[1], kind), binder.destination(ins.operands[0], _U32)
    if fields["op"] == "popc":
        return lambda: np.copyto(d, np.bitwise_count(a))

    def run() -> None:
        smeared = a.copy()
        for distance in (1, 2, 4, 8, 16, 32)[: 5 + (kind.bits == 64)]:
            smeared |= smeared >> kind.dtype.type(distance)
        used = np.bitwise_count(smeared).astype(np.uint32)  # position of the highest set bit, plus one
        np.copyto(d, np.uint32(kind.bits) - used if fields["op"] == "clz" else used - np.uint32(1))

    return run


@instruction("brev", r"\.(?P<type>b32|b64)", kind="int")
def reverse_bits(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    kind = parse_type(fields["type"])
    a, d = operands(binder, ins, kind)
    reversed_byte = np.array([int(f"{i:08b}"[::-1], 2) for i in range(256)], np.uint8)

    def run() -> None:
        octets = np.ascontiguousarray(np.broadcast_to(a, d.shape)).view(np.uint8).reshape(d.size, -1)
        np.copyto(d, np.ascontiguousarray(reversed_byte[octets[:, ::-1]]).view(kind.dtype).ravel())

    return run


@instruction("lop3", r"\.b32", kind="int")
def logic_of_three(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Bit i of the table is the result for a, b, c = the bits of i, most significant first."""
    a, b, c = (binder.source(o, _U32) for o in ins.operands[1:4])
    table, d = int(ins.operands[4], 0), binder.destination(ins.operands[0], _U32)

    def run() -> None:
        result = np.zeros_like(d)
        for i in range(8):
            if table >> i & 1:
                result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        np.copyto(d, result)

    return run


@instruction("prmt", r"\.b32", kind="int")
def permute_bytes(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Nibble i of the selector picks byte i of the result from the eight of {b, a}; its top bit asks for that byte's
    sign in all bits."""
    a, b, selector, d = operands(binder, ins, _U32)
    if selector.ndim == 0:
        return _by_bytes((a, b), int(selector), d)

    def run() -> None:
        both = a | b.astype(np.uint64) << np.uint64(32)
        result = np.zeros(d.shape, np.uint64)
        for i in range(4):
            nibble = selector >> np.uint32(4 * i)
            octet = both >> (nibble & np.uint32(7)) * np.uint64(8) & np.uint64(0xFF)
            signs = (octet >> np.uint64(7)) * np.uint64(0xFF)
            result |= np.where(nibble & np.uint32(8), signs, octet) << np.uint64(8 * i)
        np.copyto(d, result, "same_kind")

    return run


def _by_bytes(sources: tuple[Lanes, Lanes], selector: int, d: Lanes) -> Operation:
    """A selector that is a constant: four columns of bytes are copied, each from where its nibble says."""
    result = np.empty_like(d)  # the destination may be a source too
    into = result.view(np.int8).reshape(-1, 4)
    octets = [np.atleast_1d(one).view(np.int8).reshape(-1, 4) for one in sources]
    parts = []
    for i in range(4):
        nibble = selector >> 4 * i & 15
        parts.append((into[:, i], octets[nibble >> 2 & 1][:, nibble & 3], bool(nibble & 8)))

    def run() -> None:
        for target, source, signs in parts:
            target[:] = source >> 7 if signs else source
        np.copyto(d, result)

    return run


@instruction("mov", r"\.(?P<type>pred|[bus](?:16|32|64)|f32|f64)", kind="move")
def move(binder: Binder, ins: Instruction, fields: Fields) -> Operation:
    """Also packs `{a, b}` into a register and unpacks one; the first part is the lowest."""
    kind = parse_type(fields["type"])
    into, out_of = ins.operands
    if into.startswith("{") or out_of.startswith("{"):
        return _move_vector(binder, kind, into, out_of)
    return partial(np.copyto, binder.destination(into, kind), binder.source(out_of, kind))


def _move_vector(binder: Binder, kind: PtxType, into: str, out_of: str) -> Operation:
    parts = vector_parts(into if into.startswith("{") else out_of)
    narrow = parse_type(f"b{kind.bits // len(parts)}")
    raw = parse_type(f"b{kind.bits}")
    if into.startswith("{"):
        columns = binder.source(out_of, raw)
        columns = np.broadcast_to(columns, (binder.count,)) if columns.ndim == 0 else columns
        columns = np.ascontiguousarray(columns).view(narrow.dtype).reshape(-1, len(parts))
        pairs = [(binder.destination(part, narrow), columns[:, i]) for i, part in enumerate(parts) if part != "_"]
    else:
        columns = binder.destination(into, raw).view(narrow.dtype).reshape(-1, len(parts))
        pairs = [(columns[:, i], binder.source(part, narrow)) for i, part in enumerate(parts)]

    def run() -> None:
        for target, source in pairs:
            np.copyto(target, source)

    return run
