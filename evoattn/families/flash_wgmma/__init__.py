"""The family `flash_wgmma`: its parameters, launches, resources and refusals."""
