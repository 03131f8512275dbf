"""What comes from outside: JSON of any form, and text that does harm where it is code, a path or an escape."""

from hypothesis import strategies as st

from evoattn.families.registry import load_space
from evoattn.model import gpu
from evoattn.model.problem import AttentionProblem

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
EVIL = '"; system("id"); //\n*/ </script><script>alert(1)</script>\x1b]0;x\x07 ../../etc/passwd'
PROBLEM = AttentionProblem(1, 1, 1, 64, 64, 16, name="small")
SPACE = load_space("flash_scalar", gpu.GPUS["l4"])
