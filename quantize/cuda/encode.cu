// CUDA encoder of EXL3 tiles: tail-biting Viterbi over all 65,536 states of the bitshift trellis.
//
// Terms as in quantize/native/encode_kernel.h. S_t = (S_{t-1} << D(t) | symbol_t) mod 2^16 is the state at ring
// position t, codebook[S_t] its value, and D(t) the symbol width: K, or for half-integer K floor(K) at even t and one
// more at odd t. The node entering position t is S_t >> D(t), the bits that S_{t-1} and S_t share.
//
// A step over position t takes costs of the nodes entering t to costs of the nodes entering t + 1:
//     to[s mod 2^(16 - D(t+1))] = min over s of from[s >> D(t)] + (codebook[s] - weight_t)^2
// Read with the bits of s reversed this is the same step with D(t) and D(t+1) exchanged, so one routine also walks the
// trellis backwards when it is given the bit-reversed codebook. A search runs forward and backward to a position in
// the middle, where the sum of both costs is smallest at the node on the best path:
//
// 1. over positions -lead .. lead-1 with free ends: its middle, position 0, is where the ring is closed;
// 2. over the whole ring from that node to itself, with position 128 in the middle. Every kKeep-th row of costs is kept
//    in device memory, and tracing back from the middle both ways evaluates again the few edges that lead there,
//    with the arithmetic of the steps. So the inner loop keeps no back-pointers and needs no index bookkeeping.
//
// One thread block a multiprocessor. Its 512 threads hold the whole codebook in registers, 64 half2 each: the states
// that a thread owns never change, and they are chosen so that every minimum falls within a thread. Per two edges
// that leaves an add (code - weight), a fused multiply-add (square + cost) and a minimum, of which the compiler fuses
// two into one instruction where the chip has it (VHMNMX, sm_90). Costs of a step lie in shared memory. Two tiles go
// through a block at once to share its barriers, and a warp a direction traces back once a few of them are done.
//
// Costs are fp16 and never negative: every eighth step the smallest is subtracted, which keeps the good nodes near
// zero where fp16 is finest.
#include "encode.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "search.cuh"

namespace moefit {
namespace {

// The codebook in the order in which threads keep it, and as fp16.
template <int TwoK>
__global__ void prepare_kernel(const float* values, half2* codes, half* table) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;  // [2, kPairs / 4, kThreads, 4]
    const bool backward = at >= kPairs * kThreads;
    const int e = at / (4 * kThreads) % (kPairs / 4) * 4 + at % 4, thread = at / 4 % kThreads;
    const int2 s = Trellis<TwoK>::states(thread, e);
    const auto value = [&](int state) { return __float2half_rn(values[backward ? __brev(state) >> 16 : state]); };
    codes[at] = __halves2half2(value(s.x), value(s.y));
    if (at < kStates) table[at] = __float2half_rn(values[at]);
}

struct Device {
    int multiprocessors, shared_limit;
};

cudaError_t this_device(Device* device) {
    int id;
    if (cudaError_t e = cudaGetDevice(&id)) return e;
    if (cudaError_t e = cudaDeviceGetAttribute(&device->multiprocessors, cudaDevAttrMultiProcessorCount, id)) return e;
    return cudaDeviceGetAttribute(&device->shared_limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, id);
}

struct Request {
    const float* tiles;
    int64_t count;
    const void* tables;
    int lead;
    uint16_t* states;
    void* scratch;
    size_t scratch_bytes;
    cudaStream_t stream;
};

static_assert(MOEFIT_TABLES_BYTES == 3 * kStates * sizeof(half));  // codes both ways and the plain table

// With scratch null only says how many bytes help: `least` for one round at a time, `most` for all warps tracing back.
template <int TwoK, int Tiles>
cudaError_t launch(const Request& r, const Device& device, size_t* least, size_t* most) {
    using T = Trellis<TwoK>;
    const int64_t blocks = std::min<int64_t>(device.multiprocessors, r.count);
    const int64_t needed_rounds = (r.count + blocks * Tiles - 1) / (blocks * Tiles);
    const int64_t most_rounds = std::min<int64_t>(kMostTiles / Tiles, needed_rounds);
    const size_t round = size_t(blocks) * Tiles * kRing / T::kKeep * T::kRow0 * sizeof(half);
    *least = round;
    *most = round * most_rounds;
    if (!r.scratch) return cudaSuccess;
    if (r.scratch_bytes < *least) return cudaErrorInvalidValue;
    constexpr int kShared = sizeof(Shared<TwoK, Tiles>);
    const auto kernel = encode_kernel<TwoK, Tiles>;
    if (cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared)) return e;
    const auto rounds = static_cast<int>(std::min<int64_t>(most_rounds, r.scratch_bytes / round));
    const auto* table = static_cast<const half*>(r.tables) + 2 * kStates;
    const Job job{r.tiles, static_cast<const uint4*>(r.tables), table, static_cast<half*>(r.scratch), r.states, r.count,
                  r.lead, rounds};
    kernel<<<static_cast<int>(blocks), kThreads, kShared, r.stream>>>(job);
    return cudaGetLastError();
}

template <int TwoK>
cudaError_t encode(const Request& r, size_t* least, size_t* most) {
    Device device;
    if (cudaError_t e = this_device(&device)) return e;
    if constexpr (TwoK > 2) {  // the costs of two tiles of K = 1 fit no shared memory
        if (int(sizeof(Shared<TwoK, 2>)) <= device.shared_limit && r.count > device.multiprocessors) {
            return launch<TwoK, 2>(r, device, least, most);
        }
    }
    if (int(sizeof(Shared<TwoK, 1>)) > device.shared_limit) return cudaErrorNotSupported;
    return launch<TwoK, 1>(r, device, least, most);
}

// Calls f with 2K as a compile-time constant.
template <class F>
cudaError_t dispatch(int twice_k, F f) {
    switch (twice_k) {
#define MOEFIT_CASE(k) case k: return f(std::integral_constant<int, k>());
        MOEFIT_CASE(2)
        MOEFIT_CASE(3)
        MOEFIT_CASE(4)
        MOEFIT_CASE(5)
        MOEFIT_CASE(6)
        MOEFIT_CASE(7)
        MOEFIT_CASE(8)
        MOEFIT_CASE(10)
        MOEFIT_CASE(12)
        MOEFIT_CASE(14)
        MOEFIT_CASE(16)
#undef MOEFIT_CASE
        default: return cudaErrorInvalidValue;
    }
}

cudaError_t encode(int twice_k, const Request& r, size_t* least, size_t* most) {
    if (r.count < 0 || r.lead < 2 || r.lead > kRing || r.lead % 2) return cudaErrorInvalidValue;
    *least = *most = 0;
    if (r.count == 0) return cudaSuccess;
    return dispatch(twice_k, [&](auto k) { return encode<k()>(r, least, most); });
}

}  // namespace
}  // namespace moefit

MOEFIT_API int moefit_prepare(const float* values, int twice_k, void* tables, cudaStream_t stream) {
    using namespace moefit;
    auto* codes = static_cast<half2*>(tables);
    return dispatch(twice_k, [&](auto k) {
        prepare_kernel<k()><<<kStates / 256, 256, 0, stream>>>(values, codes, reinterpret_cast<half*>(codes + kStates));
        return cudaGetLastError();
    });
}

MOEFIT_API int moefit_encode_scratch(int64_t count, int twice_k, size_t* least, size_t* most) {
    return moefit::encode(twice_k, {nullptr, count, nullptr, 2, nullptr, nullptr, 0, nullptr}, least, most);
}

MOEFIT_API int moefit_encode(const float* tiles, int64_t count, const void* tables, int twice_k, int lead,
                             uint16_t* states, void* scratch, size_t scratch_bytes, cudaStream_t stream) {
    if (!scratch && count > 0) return cudaErrorInvalidValue;
    size_t least, most;
    const moefit::Request request{tiles, count, tables, lead, states, scratch, scratch_bytes, stream};
    return moefit::encode(twice_k, request, &least, &most);
}

MOEFIT_API const char* moefit_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
