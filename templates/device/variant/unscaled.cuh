// unscaled.cuh: K and V are of the type of Q, and have no scales.
#define SCALE_PARAMETERS
#define SCALE_ARGUMENTS
#define QUERY_SCALE_ARGUMENTS \
  {}
