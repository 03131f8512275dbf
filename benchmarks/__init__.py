"""What evoattn is measured with; each program says by `--help` what it asks."""
