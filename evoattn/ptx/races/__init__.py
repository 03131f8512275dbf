"""Vector clocks, and the detectors for shared memory, global memory and the asynchronous engines."""
