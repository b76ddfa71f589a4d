// C interface of the CUDA encoder. Every function returns a cudaError_t and works on the current device; pointers are
// device memory unless said otherwise, and kernels are queued on `stream`.
#pragma once
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#define MOEFIT_API extern "C" __attribute__((visibility("default")))

#define MOEFIT_TABLES_BYTES 393216

// Writes the codebook as the encoder reads it for one K. values: float32 [65536], within +-4.
// tables: MOEFIT_TABLES_BYTES, aligned to 256 bytes; may serve any number of calls and streams afterwards.
// twice_k: 2K, 2 .. 8 and 10, 12, 14, 16.
MOEFIT_API int moefit_prepare(const float* values, int twice_k, void* tables, cudaStream_t stream);

// Bytes that moefit_encode wants as scratch: at least `least`; anything up to `most` makes it some percent faster.
// Neither falls as `count` grows. least, most: host memory.
MOEFIT_API int moefit_encode_scratch(int64_t count, int twice_k, size_t* least, size_t* most);

// Encodes `count` tiles. tiles: float32 [count, 256] in ring order; what lies beyond +-16 counts as +-16, NaN as -16.
// tables: of moefit_prepare, for the same twice_k. states: uint16 [count, 256]. scratch: aligned to 256 bytes, in use
// until the stream is done with it. lead: positions searched before and after position 0 to find the node on which the
// ring is closed; even, 2 .. 256, normally 128.
// The states depend on the tile, the codebook, K and lead only: not on the batch, the scratch or the card.
// cudaErrorInvalidValue for an argument out of range, cudaErrorNotSupported where a thread block can have too little
// shared memory (K = 1 needs 130 KiB, K = 1.5 97 KiB, others less).
MOEFIT_API int moefit_encode(const float* tiles, int64_t count, const void* tables, int twice_k, int lead,
                             uint16_t* states, void* scratch, size_t scratch_bytes, cudaStream_t stream);

MOEFIT_API const char* moefit_error(int code);
