"""How fast a kernel is: CUDA-graph timing, finals, clocks, ranking."""
