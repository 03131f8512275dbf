"""The family `latent_wgmma`: its parameters, launches, resources and refusals."""
