"""The family `large_head`: its parameters, launches, resources and refusals."""
