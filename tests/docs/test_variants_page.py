"""The page of variants says which family serves which as the families do."""

import pytest

from evoattn.families import registry
from evoattn.model.gpu import GPUS
from evoattn.model.shape_text import parse_shape
from tests.docs.test_docs import ROOT

SHAPE = "B=2,H=8,Hkv=2,S=1024,D=64,dtype=bf16,layout=bshd,mask=full"
ROWS = {
    "scale": ("scale=0.1",),
    "window, softcap, sinks, slopes, bias, expressions": (
        *("window=128:0", "softcap=50", "sink=1", "alibi=1", "bias=hs", "score=s*2"),
    ),
    "keys in use, pages": ("seqused=16:1024", "seqused=16:1024,page=16"),
    "packed sequences": ("varlen=16:1024",),
    "a block list": ("blocks=128x128:300+700",),
    "head_dim of V": ("Dv=128",),
    "K and V of 8 bits": ("kv=e4m3", "kv=int8,scales=token"),
}
LATENT = "B=2,H=16,Hkv=1,Sq=1,Sk=1024,D=192,Dv=128,shared_kv=1,dtype=bf16"


def cells():
    """(variant, family, what the page says), `the others` for the families without a column."""
    lines = (ROOT / "docs/variants.md").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| variant | flash_wgmma"))
    names = [word.strip() for word in lines[start].strip("|").split("|")][1:]
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        what, *said = (word.strip() for word in line.strip("|").split("|"))
        yield from ((what, name, text) for name, text in zip(names, said, strict=True))


@pytest.mark.parametrize("what, name, said", list(cells()))
def test_a_family_serves_what_the_page_says(what, name, said):
    shown = {family for _, family, _ in cells()} - {"the others"}
    families = [name] if name in registry.FAMILIES else sorted(set(registry.FAMILIES) - shown)
    shapes = [f"{SHAPE},{words}" for words in ROWS.get(what, ())] or [LATENT]
    if name == "latent_wgmma":
        shapes = [f"{LATENT},{words}" for words in ROWS.get(what, ()) if "Dv" not in words] or shapes
    for family in map(registry.lookup, families):
        plain = family.why_unsupported(parse_shape(LATENT if name == "latent_wgmma" else SHAPE), GPUS["h100"])
        for shape in shapes:
            why = family.why_unsupported(parse_shape(shape), GPUS["h100"])
            assert (why is None) == (said != "no") or (plain and name == "the others"), (family.name, shape, why)


RANGES = [(name, said) for what, name, said in cells() if what == "head_dim of V" and said != "no"]


@pytest.mark.parametrize("name, said", RANGES)
def test_the_widths_of_v_are_those_of_the_page(name, said):
    least, most = map(int, said.split(" to "))
    below = least - 8 or 4  # the widths that a problem may have: 4 and multiples of 8
    for width, served in ((below, False), (least, True), (most, True), (most + 8, False)):
        why = registry.lookup(name).why_unsupported(parse_shape(f"{SHAPE},Dv={width}"), GPUS["h100"])
        assert (why is None) == served, (width, why)


def test_packed_sequences_have_no_bias():
    shape = f"{SHAPE},varlen=16:1024,bias=hs"
    with pytest.raises(ValueError, match="bias"):
        parse_shape(shape)
