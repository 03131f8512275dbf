"""The family `backward_wgmma`: its parameters, launches, resources and refusals."""
