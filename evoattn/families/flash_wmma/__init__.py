"""The family `flash_wmma`: its parameters, launches, resources and refusals."""
