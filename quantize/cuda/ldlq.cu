// LDLQ over a group of matrices, one- and two-sided, and packing. quantize/ldlq.py is the plain version.
//
// With E = W - Q, L = I + lower_in and M = I + lower_out, tile (i, j) is encoded as
//     W_ij + sum over (i', j') >= (i, j), not both equal, of L[i', i]^T E_i'j' M[j', j]
// F_ij = sum over j' >= j of E_ij' M[j', j] is kept for every finished tile, so that this splits into sums over one
// row and one column of tiles:
//     row_ij = sum over j' > j of E_ij' M[j', j]      target_ij = W_ij + row_ij + sum over i' > i of L[i', i]^T F_i'j
// and F_ij = row_ij + E_ij once the tile is encoded. All operands lie as [long, 16] so that both sums are the same
// routine, A^T B of two such streams, in float32 and in an order that depends on the tile alone: neither the group nor
// the order of tiles changes a bit of the result.
//
// The host says in which order (cuda_ldlq.py: full rounds of the encoder, taken from all matrices). A step is three
// launches: targets, encoder, and `commit`, which puts states, Q, E and F in their places.
#include "ldlq.h"

#include <algorithm>

namespace moefit {
namespace {

constexpr int kTile = 16;
constexpr int kElements = kTile * kTile;  // and threads of a block: one each
constexpr int kWarps = kElements / 32;
constexpr int kRowsAtOnce = 8 * kWarps;   // of the streams: a warp takes 8

struct Place {
    int64_t matrix, i, j;
};

struct Group : moefit_ldlq_group {
    int64_t rows, columns;  // of tiles

    __device__ Place place(int tile) const { return {tile / columns / rows, tile / columns % rows, tile % columns}; }
    __device__ const float* lower_in_column(const Place& p) const {
        return lower_in + ((own_in ? p.matrix : 0) * rows + p.i) * k * kTile;
    }
    __device__ const float* lower_out_column(const Place& p) const {
        return lower_out + ((own_out ? p.matrix : 0) * columns + p.j) * n * kTile;
    }
    __device__ float* error_row(const Place& p) const { return error_columns + (p.matrix * rows + p.i) * n * kTile; }
    __device__ float* feedback_column(const Place& p) const {
        return feedback + (p.matrix * columns + p.j) * k * kTile;
    }
    // Element [row, column] of the tile in W and Q.
    __device__ int64_t element(const Place& p, int row, int column) const {
        return (p.matrix * k + p.i * kTile + row) * n + p.j * kTile + column;
    }
};

__device__ int ring_position(int row, int column) {
    return (column % 8 * 4 + row % 8 / 2) * 8 + (row & 1) + row / 8 * 2 + column / 8 * 4;
}

// Folds the halves of `count` values of lanes that differ in bit `lane_bit`: each keeps the half that its bit names.
template <int Count>
__device__ __forceinline__ void fold(float* values, int lane_bit) {
    const bool upper = threadIdx.x & lane_bit;
#pragma unroll
    for (int e = 0; e < Count / 2; e++) {
        const float mine = upper ? values[e + Count / 2] : values[e];
        const float other = upper ? values[e] : values[e + Count / 2];
        values[e] = mine + __shfl_xor_sync(~0u, other, lane_bit);
    }
}

// A^T B of streams a, b: [count, 16], count a multiple of 16. Thread t gets element [t / 16, t % 16].
// Four lanes share a row of the streams, each with a quarter of the products, so that a warp reads 8 whole rows.
__device__ __forceinline__ float product(const float* a, const float* b, int count,
                                         float (&partial)[kWarps][kElements]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int top = lane / 2 % 2 * 8, left = lane % 2 * 8, first = warp * 8 + lane / 4;
    float sum[64] = {};  // [8, 8]
    float4 next[4];
    const auto load = [&](int r) {
        const auto* from_a = reinterpret_cast<const float4*>(a + int64_t{r} * kTile + top);
        const auto* from_b = reinterpret_cast<const float4*>(b + int64_t{r} * kTile + left);
        next[0] = from_a[0], next[1] = from_a[1], next[2] = from_b[0], next[3] = from_b[1];
    };
    if (first < count) load(first);
    for (int r = first; r < count; r += kRowsAtOnce) {
        const float x[8] = {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w};
        const float y[8] = {next[2].x, next[2].y, next[2].z, next[2].w, next[3].x, next[3].y, next[3].z, next[3].w};
        if (r + kRowsAtOnce < count) load(r + kRowsAtOnce);
#pragma unroll
        for (int e = 0; e < 64; e++) sum[e] = fmaf(x[e / 8], y[e % 8], sum[e]);
    }
    fold<64>(sum, 16);  // rows 0-3 or 4-7
    fold<32>(sum, 8);
    fold<16>(sum, 4);
    const int row = top + lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2;
    __syncthreads();  // an earlier call may still be reading
#pragma unroll
    for (int e = 0; e < 8; e++) partial[warp][row * kTile + left + e] = sum[e];
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) total += partial[w][threadIdx.x];
    return total;
}

__global__ void __launch_bounds__(kElements, 2) target_kernel(const Group g, const int32_t* order) {
    __shared__ float partial[kWarps][kElements];
    const Place p = g.place(order[blockIdx.x]);
    const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
    const int64_t out = int64_t{blockIdx.x} * kElements;
    float target = g.weight[g.element(p, row, column)];
    if (g.lower_out) {
        const int64_t from = (p.j + 1) * kTile;
        const float sum = product(g.error_row(p) + from * kTile, g.lower_out_column(p) + from * kTile,
                                  static_cast<int>(g.n - from), partial);
        g.row_sums[out + threadIdx.x] = sum;
        target += sum;
    }
    const int64_t from = (p.i + 1) * kTile;
    target += product(g.lower_in_column(p) + from * kTile, g.feedback_column(p) + from * kTile,
                      static_cast<int>(g.k - from), partial);
    g.targets[out + ring_position(row, column)] = target;
}

__global__ void __launch_bounds__(kElements) commit_kernel(const Group g, const int32_t* order) {
    const Place p = g.place(order[blockIdx.x]);
    const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
    const int64_t in = int64_t{blockIdx.x} * kElements;
    g.states[int64_t{order[blockIdx.x]} * kElements + threadIdx.x] = g.step_states[in + threadIdx.x];
    const float value = g.values[g.step_states[in + ring_position(row, column)]];
    const int64_t element = g.element(p, row, column);
    g.quantized[element] = value;
    const float error = g.weight[element] - value;
    float fed = error;
    if (g.lower_out) {
        g.error_row(p)[(p.j * kTile + column) * kTile + row] = error;
        fed += g.row_sums[in + threadIdx.x];
    }
    g.feedback_column(p)[(p.i * kTile + row) * kTile + column] = fed;
}

// A thread writes one 16-bit word: the symbols that begin before its end, from the first that reaches into it.
__global__ void pack_kernel(const uint16_t* states, int64_t words, int twice_k, uint16_t* packed) {
    const int64_t at = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (at >= words) return;
    const int words_of_tile = 8 * twice_k, begin = static_cast<int>(at % words_of_tile ^ 1) * 16;
    const uint16_t* tile = states + at / words_of_tile * kElements;
    int t = (2 * begin + 1) / twice_k, end = t * twice_k / 2;  // symbol t is stream bits t 2K / 2 .. (t + 1) 2K / 2
    uint32_t bits = 0;
    for (; end < begin + 16; t++) {
        const int width = (t + 1) * twice_k / 2 - end;
        bits = bits << width | (tile[t] & ((1u << width) - 1));
        end += width;
    }
    packed[at] = static_cast<uint16_t>(bits >> (end - begin - 16));
}

cudaError_t ldlq(const Group& g, cudaStream_t stream) {
    if (g.count < 0 || g.k % kTile || g.n % kTile || g.count * g.rows * g.columns > INT32_MAX) {
        return cudaErrorInvalidValue;
    }
    int64_t begin = 0;
    for (int64_t step = 0; step < g.steps; step++) {
        const int64_t end = g.step_ends[step];
        const auto tiles = static_cast<unsigned>(end - begin);
        target_kernel<<<tiles, kElements, 0, stream>>>(g, g.order + begin);
        if (cudaError_t e = cudaGetLastError()) return e;
        const int code = moefit_encode(g.targets, tiles, g.tables, g.twice_k, g.lead, g.step_states, g.scratch,
                                       g.scratch_bytes, stream);
        if (code) return static_cast<cudaError_t>(code);
        commit_kernel<<<tiles, kElements, 0, stream>>>(g, g.order + begin);
        if (cudaError_t e = cudaGetLastError()) return e;
        begin = end;
    }
    return cudaSuccess;
}

}  // namespace
}  // namespace moefit

MOEFIT_API int moefit_ldlq(const moefit_ldlq_group* group, cudaStream_t stream) {
    return moefit::ldlq({*group, group->k / 16, group->n / 16}, stream);
}

MOEFIT_API int moefit_pack(const uint16_t* states, int64_t count, int twice_k, uint16_t* packed, cudaStream_t stream) {
    if (count < 0 || twice_k < 2 || twice_k > 16) return cudaErrorInvalidValue;
    const int64_t words = count * 8 * twice_k;
    if (words == 0) return cudaSuccess;
    moefit::pack_kernel<<<static_cast<unsigned>((words + 255) / 256), 256, 0, stream>>>(states, words, twice_k, packed);
    return cudaGetLastError();
}
