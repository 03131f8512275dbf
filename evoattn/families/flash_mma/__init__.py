"""The family `flash_mma`: its parameters, launches, resources and refusals."""
