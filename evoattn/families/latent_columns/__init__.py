"""The family `latent_columns`: its parameters, launches, resources and refusals."""
