"""The family `quantize`: its parameters and launches."""
