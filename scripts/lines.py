"""How many lines serve what: `python scripts/lines.py [COMMIT]`, a count of the sources by capability.

A file belongs to the first capability that its path names. In all others a line that names one does, with the lines
indented under it. What is left is "forward": calls, search, evaluation, storage, report. What serves a later capability
and says none of its words counts as forward, which is so at most. "Planted faults" are tests of tests, of all of these.
"""

import argparse
import re
import subprocess
from collections import Counter

CAPABILITIES = {
    "backward": r"backward|gradient|grad_|_grad\b|requires_grad|autograd|\bdlse\b|\bd[qkv]\b|D[QKV]_|deterministic|"
    r"train",
    "FlexAttention": r"flex|block_?list|block_?mask|key_?list|mask_?blocks|mask_mod|score_mod|\bmods?\b|packed_mask|"
    r"expression|score_(cuda|lines|ranges?)|model/(score|scoring|collector)|own_score|created_masks",
    "engines": r"flash_?attn|flash_attention_suite|vllm|sglang|flash_mla|xformers|diffusers|flashinfer_bench|"
    r"hf_kernels|append_?(kv|ed)|(model|correctness|/test_)/?append|rotary|new_?keys|leftpad|"
    r"merge_(parts|two)|same_?bits|row_?bits|invariant|serving|listed_mask|latent_columns",
    "eight bits": r"fp8|e4m3|e5m2|eight_?bits?|8[ -]bits?|int8|quanti[sz]e|descale|smooth_k|scales\.py|"
    r"(key|lane|running)_scales|all_eight",
    "other cards": r"calibrat|stranger|cards/|correction|estimated",
}
PLANTED = "planted faults"
OF_FAULTS = "test_fa(cts|ults)_of|support/facts|mutation/|mutants|false_alarms|cheat|untrusted"
ROOMS = ("evoattn", "tests", "templates", "benchmarks", "scripts")
SOURCES = (".py", ".cu", ".cuh", ".j2", ".h", ".cpp", ".sh")


def named(text: str) -> str | None:
    """The capability of a path or line."""
    return next((name for name, words in CAPABILITIES.items() if re.search(words, text, re.IGNORECASE)), None)


def count(path: str, lines: list[str]) -> Counter[str]:
    """Lines of a file by capability."""
    if whole := PLANTED if re.search(OF_FAULTS, path) else named(path):
        return Counter({whole: len(lines)})
    counts, owner, under = Counter[str](), None, 0
    for line in lines:
        depth = len(line) - len(line.lstrip())
        closes = depth == under and line.lstrip().startswith((")", "}", "]"))
        if owner and line.strip() and depth <= under and not closes:
            owner = None
        if owner is None and (owner := named(line)):
            under = depth
        counts[owner or "forward"] += 1
    return counts


def git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout


def main(commit: str) -> None:
    rooms: dict[str, Counter[str]] = {room: Counter() for room in ROOMS}
    for path in git("ls-tree", "-r", "--name-only", commit, *ROOMS).splitlines():
        if path.endswith(SOURCES):
            rooms[path.split("/")[0]] += count(path, git("show", f"{commit}:{path}").splitlines())
    print("| lines | " + " | ".join(ROOMS) + " | all |\n|" + "---|" * (len(ROOMS) + 2))
    for name in ("forward", PLANTED, *CAPABILITIES, "all"):
        found = [room.total() if name == "all" else room[name] for room in rooms.values()]
        print(f"| {name} | " + " | ".join(f"{lines:,}" for lines in (*found, sum(found))) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD")
    main(parser.parse_args().commit)
