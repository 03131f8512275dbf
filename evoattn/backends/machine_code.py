"""The machine code of a cubin by itself: what tells two compiled kernels apart that differ in text only."""

import hashlib
import re
import struct
from collections.abc import Iterator

CODE_SECTIONS = re.compile(r"\.text\.|\.nv\.constant[0-3]")
"""How the names of the sections of a cubin begin that decide what it computes. Global variables (`.nv.global.init`, and
`.nv.constant4` with their addresses) are left out: those of the templates are constants that instructions hold."""


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each section of a 64-bit little-endian ELF file. Raises `ValueError` on anything else."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("a cubin is a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, kind, _, _, offset, length, *_ in headers:
        start = names + name
        content = b"" if kind == 8 else elf[offset : offset + length]  # 8: SHT_NOBITS has no bytes in the file
        yield elf[start : elf.index(b"\0", start)].decode(), content


def machine_code_hash(cubin: bytes) -> str:
    """sha256 (hex) of the instructions and constants of all kernels. Raises `ValueError` if there are none.

    Names of inlined functions, comments and line numbers of the source do not count."""
    parts = sorted((name, content) for name, content in sections(cubin) if CODE_SECTIONS.match(name))
    if not any(name.startswith(".text.") for name, _ in parts):
        raise ValueError("the cubin has no instructions")
    digest = hashlib.sha256()
    for name, content in parts:
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
