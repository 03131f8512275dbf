"""The family `large_head_mma`: its parameters, launches, resources and refusals."""
