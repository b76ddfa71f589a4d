// C interface of the CUDA encoder.
#pragma once
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of device memory that moefit_encode wants as scratch on the current device: at least `least`; anything up to
// `most` makes it some percent faster. Returns a cudaError_t.
int moefit_encode_scratch(int64_t count, int twice_k, size_t* least, size_t* most);

// Encodes `count` tiles on the current device, asynchronously on `stream`. All pointers are device memory.
// tiles: float32 [count, 256] in ring order, finite. values: float32 [65536], the codebook, within +-4.
// states: uint16 [count, 256]. scratch: aligned to 256 bytes, in use until the stream is done with it.
// twice_k: 2K, 2 .. 8 and 10, 12, 14, 16. lead: positions searched before and after position 0 to find the node on
// which the ring is closed; even, 2 .. 256, normally 128.
// The states depend on tiles, values, twice_k and lead only: not on the batch, the scratch or the card.
// Returns a cudaError_t: cudaErrorInvalidValue for an argument out of range, cudaErrorNotSupported where a thread block
// can have too little shared memory (K = 1 needs 130 KiB, K = 1.5 97 KiB, others less).
int moefit_encode(const float* tiles, int64_t count, const float* values, int twice_k, int lead, uint16_t* states,
                  void* scratch, size_t scratch_bytes, cudaStream_t stream);

const char* moefit_error(int code);

#ifdef __cplusplus
}
#endif
