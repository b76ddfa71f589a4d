// C interface of LDLQ and packing on the card; conventions as in encode.h.
#pragma once
#include "encode.h"

// Matrices W [k, n] of a group, `count` of them, in 16x16 tiles [k/16, n/16]; k and n are multiples of 16.
// L and M come as block columns: [k/16, k, 16], element [i, r, c] is L[r, 16 i + c]. Only what lies below the diagonal
// blocks is read.
struct moefit_ldlq_group {
    int64_t count, k, n;
    const float* weight;        // [count, k, n]
    const float* lower_in;      // L: [count or 1, k/16, k, 16]
    const float* lower_out;     // M: [count or 1, n/16, n, 16]; null: M = I
    int32_t own_in, own_out;    // 1: a factor for each matrix, 0: one shared by all
    const float* values;        // [65536], the codebook
    const void* tables;         // of moefit_prepare
    int32_t twice_k, lead;      // as in moefit_encode
    const int32_t* order;       // [count * k/16 * n/16], (matrix * k/16 + i) * n/16 + j: the tiles, step after step
    const int64_t* step_ends;   // host, [steps]: where each step ends in `order`. Everything below and, where there
    int64_t steps;              // is an M, right of a tile, that row and column included, is in an earlier step.
    uint16_t* states;           // out: [count, k/16, n/16, 256]
    float* quantized;           // out: [count, k, n]
    float* error_columns;       // work: [count, k/16, n, 16], E of a row of tiles, transposed; null where M is
    float* feedback;            // work: [count, n/16, k, 16], E M of a column of tiles
    float* targets;             // work: [largest step, 256], ring order
    float* row_sums;            // work: [largest step, 256]; null where M is
    uint16_t* step_states;      // work: [largest step, 256]
    void* scratch;              // of moefit_encode, for the largest step
    size_t scratch_bytes;
};

MOEFIT_API int moefit_ldlq(const struct moefit_ldlq_group* group, cudaStream_t stream);

// States uint16 [count, 256] to packed tiles uint16 [count, 16 K]: the low D(t) bits of every state.
MOEFIT_API int moefit_pack(const uint16_t* states, int64_t count, int twice_k, uint16_t* packed, cudaStream_t stream);
