"""Problems and configs of families' tests."""

from evoattn.families.registry import load_space
from evoattn.model.problem import AttentionProblem


def problem(seqlen_q=1024, seqlen_k=1024, head_dim=64, heads=4, kv_heads=2, batch=1, **rest) -> AttentionProblem:
    return AttentionProblem(batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, **rest)


def configs(family, gpu, base):
    """A function that makes a config of `base` with other genes."""
    return lambda **genes: load_space(family, gpu).make_config(base | genes)
