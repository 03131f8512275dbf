"""Global buffers, shared and local memory, tensor maps, matrix descriptors, memory traffic."""
