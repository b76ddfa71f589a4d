// Tail-biting Viterbi over the 65,536-state EXL3 trellis: what every instruction set's build provides.
#pragma once
#include <cstdint>

namespace moefit {

constexpr int kTile = 256;      // weights of one 16x16 tile, a ring
constexpr int kStates = 65536;  // 16-bit states

// Symbol width at ring position t for twice_k = 2K: K, or for half-integer K floor(K) at even t and one more at odd t.
inline int symbol_width(int t, int twice_k) { return (twice_k + (t & 1)) >> 1; }

struct EncodeJob {
    const float* tiles;   // [count, 256], ring order
    const float* values;  // [65536] codebook
    uint16_t* states;     // [count, 256] result
    int64_t count;
    int twice_k;          // 2 .. 16
    int reach;            // even, 128 .. 256: positions on either side of position 0 that the bounds see
    float slack;          // > 0: width of the search that is tried first
    float scale;          // of the codes of 8-bit bounds (bounds.h); 0 for float32 bounds
};

// Each runs the job on the calling thread. All three give the same states, bit for bit.
void encode_plain(const EncodeJob& job);
void encode_avx2(const EncodeJob& job);
void encode_avx512(const EncodeJob& job);

}  // namespace moefit
