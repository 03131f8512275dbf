#!/usr/bin/env python3
"""Whether a change of templates, headers or constants changes the machine code of any known config. Needs no GPU.

    python scripts/cubins.py record FILE [--family NAME …]
    python scripts/cubins.py compare FILE [--family NAME …] [--every N]

`record` compiles the configs of `tests/data/known_configs.jsonl`, and of families that it lacks those of
`tests/data/decisions.json`, and writes the hashes of their machine code as JSON.
`compare` does the same and holds it against FILE; it ends with exit code 1 and a list where machine code differs.
`--every N` looks at each Nth config only.

A config is compiled for every problem of its line, a name or a shape, on sm_80, sm_89 and sm_90a. Equal sources are
compiled once, and taken from the cubin cache if they are there; `compare` does not compile a source that differs from
the recorded one in comments and white space only. The hash is that of the instructions and constants alone, so
that line numbers and the names of inlined functions do not count. `tests/data/machine_code.json` is the record of
today's templates by NVRTC 13.0; it takes some five minutes on one core."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from evoattn.backends.compiler import compile_candidate, machine_code_hash, version
from evoattn.families.registry import FAMILIES, load_space
from evoattn.families.render import render
from evoattn.model.gpu import GPUS
from evoattn.model.problem import AttentionProblem
from evoattn.model.records import Candidate
from evoattn.model.shape_text import by_name_or_shape
from evoattn.model.space import ConfigError, Value, config_id
from tests.families import decisions

ARCHES = ("sm_80", "sm_89", "sm_90a")
KNOWN = Path(__file__).resolve().parent.parent / "tests/data/known_configs.jsonl"
"""Configs that searches have won or that were written by hand, one per line with its problems: names or shapes."""


def known_configs(family: str) -> list[tuple[str, dict[str, Value]]]:
    """The family's problems, names or shapes, each with a config's parameters; not all are valid on every GPU. A family
    that no search has recorded has those that `tests/data/decisions.json` draws."""
    rows = map(json.loads, KNOWN.read_text().splitlines())
    known = [(problem, row["config"]) for row in rows if row["family"] == family for problem in row["problems"]]
    drawn = (row for row in decisions.rows() if row["family"] == family)
    return known or [(AttentionProblem(**row["problem"]).describe(), row["params"]) for row in drawn]


COMPILERS = 2
HEX_DIGITS = 20
"""Of each sha256 that are kept."""
TOKEN = re.compile(
    r"""//[^\n]* | /\*.*?\*/                   # comments
      | "(?:\\.|[^"\\])*" | '(?:\\.|[^'\\])*'  # strings and characters
      | \w[\w.]*                            # names and numbers
      | [-+*/%<>=!&|^~]+ | \n[ ]*\#  | \S  # operators, the beginning of a directive, all else""",
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Code:
    """What is compared of one kernel, and the hash of the tokens of its source."""

    machine_code: str
    registers: int
    tokens: str

    def same_machine_code(self, other: Code) -> bool:
        return (self.machine_code, self.registers) == (other.machine_code, other.registers)


def tokens_hash(source: str) -> str:
    """Hex hash of the source without comments and without white space between tokens.

    Equal hashes mean equal machine code: nothing in the sources asks for its line number."""
    tokens = (token.lstrip() for token in TOKEN.findall(source) if not token.startswith(("//", "/*")))
    return hashlib.sha256("\n".join(tokens).encode()).hexdigest()[:HEX_DIGITS]


def _key(problem: AttentionProblem, candidate: Candidate, params: dict[str, Value]) -> str:
    """What a source is rendered from: family, architecture, head_dim, dtype, mask, outputs, variants and config,
    `params` being the config as it was recorded, which may be older than a parameter with a default."""
    kind = "-".join((f"d{problem.head_dim}", problem.dtype, problem.mask, *["lse"] * problem.lse, *problem.variants))
    kind += "-deterministic" * problem.deterministic + f"-d{problem.grads}" * bool(problem.grads)
    return f"{candidate.family}/{candidate.arch}/{kind}/{config_id(candidate.family, params)[:HEX_DIGITS]}"


def known_candidates(families: list[str]) -> dict[str, Candidate]:
    """The source of every known config that is valid for its named problem, on every GPU of `ARCHES`."""
    candidates: dict[str, Candidate] = {}
    for gpu in (gpu for gpu in GPUS.values() if gpu.arch in ARCHES):
        for family in (FAMILIES[name] for name in families):
            space = load_space(family.name, gpu)
            for text, params in known_configs(family.name):
                problem = by_name_or_shape(text)
                try:
                    config = space.make_config(params)
                except ConfigError:  # values of another architecture
                    continue
                if not family.why_invalid(problem, config, gpu):
                    candidate = render(family, problem, config, gpu)
                    candidates[_key(problem, candidate, params)] = candidate
    return candidates


def codes_of(candidates: dict[str, Candidate], known: dict[str, Code]) -> dict[str, Code]:
    """The code of each candidate, by its key. One with the tokens of its row of `known` is not compiled again."""
    tokens = {key: tokens_hash(candidate.source) for key, candidate in candidates.items()}
    codes = {key: known[key] for key in candidates if key in known and known[key].tokens == tokens[key]}
    different = {(tokens[key], c.arch): c for key, c in candidates.items() if key not in codes}

    def compiled(candidate: Candidate) -> tuple[str, int]:
        kernel = compile_candidate(candidate)
        return machine_code_hash(kernel.cubin)[:HEX_DIGITS], kernel.info.registers

    version()  # loads the compiler's libraries before there are threads
    with ThreadPoolExecutor(COMPILERS) as pool:
        answers = dict(zip(different, pool.map(compiled, different.values())))
    for key, candidate in candidates.items():
        if key not in codes:
            codes[key] = Code(*answers[tokens[key], candidate.arch], tokens[key])
    return dict(sorted(codes.items()))


def write(file: Path, codes: dict[str, Code]) -> None:
    rows = ",\n".join(
        f"{json.dumps(key)}: {json.dumps([c.machine_code, c.registers, c.tokens])}" for key, c in codes.items()
    )
    file.write_text(f'{{"compiler": {json.dumps(version())}, "configs": {{\n{rows}\n}}}}\n')


def read(file: Path, families: list[str]) -> tuple[str, dict[str, Code]]:
    """The compiler of a record, and its code of the families named."""
    record = json.loads(file.read_text())
    rows = {key: Code(*row) for key, row in record["configs"].items()}
    return record["compiler"], {key: code for key, code in rows.items() if key.split("/")[0] in families}


def differences(before: dict[str, Code], now: dict[str, Code]) -> list[str]:
    """A line for each config whose machine code differs, or that only one side has."""
    lines = [f"gone: {key}" for key in before if key not in now]
    for key, code in now.items():
        if key not in before:
            lines.append(f"new: {key}")
        elif not code.same_machine_code(before[key]):
            lines.append(f"differs: {key} ({before[key].registers} → {code.registers} registers)")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--family", action="append", choices=tuple(FAMILIES), help="only this family; may be repeated")
    parser.add_argument("--every", type=int, default=1, help="of the configs, only each Nth")
    arguments = parser.parse_args()
    families = arguments.family or list(FAMILIES)
    candidates = dict(sorted(known_candidates(families).items())[:: arguments.every])
    if arguments.command == "record":
        now = codes_of(candidates, {})
        write(arguments.file, now)
        print(f"{len(now)} configs, {len({c.tokens for c in now.values()})} sources: {arguments.file}")
        return 0
    compiler, before = read(arguments.file, families)
    if compiler != version():
        print(f"The record is of {compiler}, this is {version()}: the code of another compiler is not comparable.")
        return 2
    if arguments.every > 1:
        before = {key: code for key, code in before.items() if key in candidates}
    now = codes_of(candidates, before)
    lines = differences(before, now)
    same = sum(key in before and code.tokens == before[key].tokens for key, code in now.items())
    print("\n".join([*lines, f"{len(now)} configs, {same} of the same source, {len(lines)} differences."]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
