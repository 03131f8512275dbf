// plain.cuh: the kernel computes plain attention and takes no more arguments for it.
#define VARIANT_PARAMETERS
#define VARIANT_ARGUMENTS
