"""The family `backward_mma`: its parameters, launches, resources and refusals."""
