"""The bench table: the best known kernels of each problem beside every peer."""
