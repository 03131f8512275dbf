// mma.cuh: both products of the pipeline by mma.sync.
#include "three_kernel/mma_scores.cuh"
#include "three_kernel/mma_values.cuh"
