"""The family `three_kernel`: its parameters, launches, resources and refusals."""
