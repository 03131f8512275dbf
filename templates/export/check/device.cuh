// device.cuh: the buffers on the device, each between two guard bands.
#include "export/check/status.cuh"
#include "export/check/elements.cuh"

constexpr size_t GUARD_BYTES = 4096;  // on either side of every buffer
constexpr int GUARD_VALUE = 0x5A;

struct Device {
  unsigned char* whole[BUFFERS];
  void* buffer[BUFFERS];

  Device() {
    for (int i = 0; i < BUFFERS; i++) {
      EVOATTN_CUDA(cudaMalloc((void**)&whole[i], BUFFER_BYTES[i] + 2 * GUARD_BYTES));
      EVOATTN_CUDA(cudaMemset(whole[i], GUARD_VALUE, BUFFER_BYTES[i] + 2 * GUARD_BYTES));
      buffer[i] = whole[i] + GUARD_BYTES;
      EVOATTN_CUDA(cudaMemset(buffer[i], STARTS_ZEROED[i] ? 0 : 0xFF, BUFFER_BYTES[i]));  // 0xFF: NaN in every dtype
    }
  }
  void poison_outputs() {
    for (int i = 0; i < BUFFERS; i++)
      if (IS_OUTPUT[i]) EVOATTN_CUDA(cudaMemset(buffer[i], 0xFF, BUFFER_BYTES[i]));
  }
  Bytes read(int i, long begin, size_t size) const {
    Bytes bytes(size);
    EVOATTN_CUDA(cudaMemcpy(bytes.data(), (unsigned char*)buffer[i] + begin, size, cudaMemcpyDeviceToHost));
    return bytes;
  }
  bool guards_intact() const {
    for (int i = 0; i < BUFFERS; i++)
      for (long begin : {-long(GUARD_BYTES), long(BUFFER_BYTES[i])})
        for (unsigned char byte : read(i, begin, GUARD_BYTES))
          if (byte != GUARD_VALUE) {
            std::printf("FAIL: the kernel wrote outside buffer %d\n", i);
            return false;
          }
    return true;
  }
};
