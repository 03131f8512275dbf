"""Where the workers of a search run: the processes of this machine, or a Ray cluster."""
