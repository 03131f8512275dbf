// exp2_coarse.cuh: 2^x on the FMA units where it is rounded to 8 bits afterwards, for x <= 127. FORM 1: a polynomial of
// degree 2 on [-1/2, 1/2]. FORM 2: straight lines between the halves.
template <int FORM> struct CoarseExp2 {
  // (x + 127) / 256 of x = s · scale - shift, within [0, 1]: it costs no more than x. FORM 2: of x - 1.
  static __device__ __forceinline__ float place(float s, float scale, float shift) {
    float y;
    asm("fma.rn.sat.f32 %0, %1, %2, %3;"
        : "=f"(y)
        : "f"(s), "f"(scale * 0x1p-8f), "f"(fmaf(shift, -0x1p-8f, (FORM == 2 ? 126.f : 127.f) * 0x1p-8f)));
    return y;
  }
  static __device__ __forceinline__ float at(float place) {
    if constexpr (FORM == 2) {
      const int low = __float_as_int(fmaf(place, 256.f, 512.f)) << 9;  // the bits of 2^floor(x) (1 + x - floor(x))
      float y;
      asm("fma.rn.ftz.f32 %0, %1, %2, %3;"
          : "=f"(y)
          : "f"(__int_as_float(low + (1 << 22))), "f"(2.f / 3.f), "f"(__int_as_float(low)));
      return y;
    }
    constexpr float ZERO = 12582912.f - 127.f;  // 1.5 · 2^23: the low bits of the sum are an integer
    const float rounded = fmaf(place, 256.f, ZERO);
    const float rest = fmaf(place, 256.f, -(rounded - ZERO));
    const float y = fmaf(rest, fmaf(rest, C2, C1), 1.f);
    return __int_as_float((__float_as_int(rounded) << 23) + __float_as_int(y));
  }
  static constexpr float C1 = 0.70300f, C2 = 0.24000f;
};
