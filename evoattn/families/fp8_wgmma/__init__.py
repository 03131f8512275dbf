"""The family `fp8_wgmma`: its parameters, launches, resources and refusals."""
