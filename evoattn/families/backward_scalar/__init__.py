"""The family `backward_scalar`: its parameters, launches, resources and refusals."""
