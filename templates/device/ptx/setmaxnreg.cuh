// setmaxnreg.cuh: registers move between warpgroups (sm_90a). All warps of a warpgroup run it; REGISTERS is 24 to 256
// in steps of 8. An increase waits until the decreases of other warpgroups have freed enough.
template <int REGISTERS> __device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
