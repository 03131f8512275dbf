"""The family `split_kv`: its parameters, launches, resources and refusals."""
