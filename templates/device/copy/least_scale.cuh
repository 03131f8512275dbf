// least_scale.cuh: what scales of V of each key are at least, where weights have a part of them.

constexpr float LEAST_SCALE = 7.8886090522101181e-31f;  // 2^-100: a scale of V of 0 has no logarithm
