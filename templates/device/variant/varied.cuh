// varied.cuh: the arguments of a kernel that computes a variant of attention: what its variants need, in the order of
// `VariantArguments`, whose other fields are 0 (`given` in evoattn/families/variants.py makes both of one list), then
// those of an expression of scores.
#define VARIANT_PARAMETERS GIVEN_PARAMETERS OWN_SCORE_PARAMETERS
#define VARIANT_ARGUMENTS GIVEN_ARGUMENTS OWN_SCORE_ARGUMENTS
