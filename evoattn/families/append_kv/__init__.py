"""The family `append_kv`: its parameters and launch."""
