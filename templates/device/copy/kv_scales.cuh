// kv_scales.cuh: where the scales of K and V of 8 bits are (evoattn/model/scales.py). A scale of K multiplies a score.
// One of V that is the same for all keys multiplies O, and one of each key is a part of its weight: with l = log2 of
// it, p = 2^(s + l - shift) is what V is weighed with, and p / scale what is summed up.
#include "device/copy/least_scale.cuh"
#include "device/ptx/element.cuh"

struct ScaleSource {
  const float* gmem = nullptr;
  int64_t batch = 0, head = 0, row = 0;  // strides in elements
};
struct KvScales {
  ScaleSource k, v;
};

enum class Scales {
  NONE,  // K and V are of the type of Q
  HEAD,  // the same for all keys of a sequence's head
  KEY,   // of each key
};
