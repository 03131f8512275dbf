"""The family `flash_scalar`: its parameters, launches, resources and refusals."""
