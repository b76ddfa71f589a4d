// One step of the trellis: which thread owns which states, where costs lie, and the arithmetic. See encode.cu.
#pragma once
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace moefit {
namespace {

constexpr int kRing = 256;
constexpr int kStates = 1 << 16;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kOwned = kStates / kThreads;  // states a thread owns
constexpr int kPairs = kOwned / 2;          // half2
constexpr int kRenormalize = 8;             // steps
constexpr float kLimit = 16.0f;             // weights are clamped: no codebook reaches 4, and the sum of any
                                            // kRenormalize + 16 squared distances must stay finite in fp16
constexpr uint16_t kUnreachable = 0x7c00;   // +inf

__device__ __forceinline__ half2 as_half2(uint32_t x) {
    half2 h;
    memcpy(&h, &x, sizeof h);
    return h;
}
__device__ __forceinline__ uint32_t as_bits(half2 h) {
    uint32_t x;
    memcpy(&x, &h, sizeof x);
    return x;
}
// Barriers that a warp arrives at after it stored its costs of a step, and waits for before it loads those of others in
// the next step of the same tile. In between it works on another tile.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}
__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier) {  // one arrival a warp
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
        asm volatile("{.reg .b64 t; mbarrier.arrive.shared.b64 t, [%0];}" ::"r"(shared_address(barrier)) : "memory");
    }
}
// Waits until the last phase of that parity is complete; parity 1 is, before there was any.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
    uint32_t done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#else
        asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
#endif
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!done);
}

__device__ __forceinline__ half clamped_minus(float weight) {
    return __float2half_rn(-fminf(fmaxf(weight, -kLimit), kLimit));
}

// Which states a thread owns, and where the cost of a node lies. With B the larger symbol width, s = [h: B bits][j]
// [i: B bits]: a step takes minima over (the high bits of) h, and all s with the same h, j and high bits of i share
// their from-node.
template <int TwoK>
struct Trellis {
    static constexpr int kEven = TwoK / 2, kOdd = (TwoK + 1) / 2;
    static constexpr int kB = kOdd, kJ = 1 << (16 - 2 * kB);
    __host__ __device__ static constexpr int width(int t) { return (TwoK + (t & 1)) >> 1; }  // D(t)

    // A half2 holds states of neighbouring j. For B >= 6 there are too few of those: neighbouring i, and a row of costs
    // lists the 2^B nodes that a j reads one after the other.
    static constexpr bool kTransposed = kB >= 6;

    // A thread owns kH of the 2^B values of h, kU consecutive j and kI consecutive i, kQ times. kSplit threads share
    // j and i and combine their minima; kSlices threads share j.
    static constexpr int kSplit = std::max(1, (2 << kB) / kOwned);
    static constexpr int kH = (1 << kB) / kSplit;
    static constexpr int kU = kTransposed ? 1 : std::max(2, 16 >> kB);
    static constexpr int kI = kTransposed ? 2 : std::min(1 << kB, kOwned / kH / kU);
    static constexpr int kQ = kOwned / (kH * kU * kI);
    static constexpr int kSlices = (1 << kB) / kI;
    static constexpr int kOut = kU * kI / 2;            // half2
    static constexpr int kUnits = kThreads / kSplit;    // (j, i) blocks side by side

    // Every how many rows one is kept for tracing back, which reads the costs of 2^(K kKeep) nodes from it: more rows
    // cost memory (4 MB a tile at most), fewer cost time. Divides kRenormalize; even for half-integer K.
    static constexpr int kKeep = TwoK <= 2 ? 8 : TwoK <= 4 ? 4 : TwoK <= 7 ? 2 : 1;
    static constexpr int kKept = kRing / 2 / kKeep;     // in each direction

    // Place of a node's cost in its row. A thread stores two runs of costs, 2^kSwap apart; exchanging every other pair
    // of runs keeps the threads of a warp on different banks. Transposed rows are padded to the same end.
    static constexpr int kSwap = std::max(3, kB);
    static constexpr int kStride = (1 << kB) + (kJ > 1 ? 8 : 0);
    __host__ __device__ static constexpr int place(int node) {
        if (kTransposed) return (node & (kJ - 1)) * kStride + (node >> (16 - 2 * kB));
        return kB == 5 ? node : node ^ (((node >> 6) & 1) << kSwap);
    }
    // Elements of a row of nodes entering a position of symbol width w.
    static constexpr int row_size(int w) { return kTransposed ? kJ * kStride : 1 << (16 - w); }
    static constexpr int kRow0 = row_size(kEven), kRow1 = row_size(kOdd);

    // h of the i-th of a thread's kH values.
    __device__ static constexpr int own_h(int i, int part) {
        return kSplit == 1 ? i : (i / 8 * kSplit + part) * 8 + i % 8;
    }
    // The states of pair e of a thread.
    __device__ static int2 states(int thread, int e) {
        const int v = e % kOut, h = own_h(e / kOut % kH, thread % kSplit);
        const int x = e / (kOut * kH) * kUnits + thread / kSplit;
        const int j = x / kSlices * kU + (kTransposed ? 0 : 2 * (v / kI));
        const int i = x % kSlices * kI + (kTransposed ? 0 : v % kI);
        const int s = h << (16 - kB) | j << kB | i;
        return make_int2(s, s + (kTransposed ? 1 : 1 << kB));
    }
};

// `Count` fp16 costs as 32-bit words.
template <int Count>
__device__ __forceinline__ void load_costs(const half* from, uint32_t* words) {
    if constexpr (Count == 2) {
        words[0] = *reinterpret_cast<const uint32_t*>(from);
    } else if constexpr (Count == 4) {
        const uint2 v = *reinterpret_cast<const uint2*>(from);
        words[0] = v.x, words[1] = v.y;
    } else {
        static_assert(Count == 8);
        const uint4 v = *reinterpret_cast<const uint4*>(from);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}

// As one vector. Through the intrinsic a store to device memory stays one, also where it is predicated.
template <int Words, bool Global>
__device__ __forceinline__ void store_costs(half* to, const uint32_t* words) {
    const auto store = [to](auto vector) {
        auto* at = reinterpret_cast<decltype(vector)*>(to);
        if constexpr (Global) {
            __stcg(at, vector);
        } else {
            *at = vector;
        }
    };
    if constexpr (Words == 1) {
        store(words[0]);
    } else if constexpr (Words == 2) {
        store(make_uint2(words[0], words[1]));
    } else {
        static_assert(Words == 4);
        store(make_uint4(words[0], words[1], words[2], words[3]));
    }
}

// What a step does besides.
struct Extra {
    bool notes = false, subtracts = false, keeps = false;
    uint32_t* smallest;  // note the smallest cost here, or subtract what was noted: shared, bits of an fp16
    half* keep;          // store the row here too
};

// minus_weight: both halves alike.
template <class T, int In, int Out>
__device__ __forceinline__ void step(const half2 (&code)[kPairs], half2 minus_weight, const half* from, half* to,
                                     int thread, const Extra& extra) {
    constexpr int kB = T::kB;
    constexpr int kNext = 1 << (kB - Out);                  // values of h's low bits, which stay in the to-node
    constexpr int kCount = T::kU << (kB - In);              // from-nodes in reach of one h, neighbours
    const int x = thread / T::kSplit;
    half2 least = as_half2(kUnreachable * 0x10001u);
    if (extra.subtracts) least = as_half2(*extra.smallest * 0x10001u);
#pragma unroll
    for (int q = 0; q < T::kQ; q++) {
        uint32_t cost[T::kH * (T::kTransposed ? 1 : kCount) / 2];
        const int upper = x % T::kSlices * T::kI >> In & 1;  // i's high bit for In < B, where a thread has one only
        if constexpr (T::kTransposed) {
            const half* row = from + x / T::kSlices * T::kStride;
#pragma unroll
            for (int h = 0; h < T::kH; h += 8) load_costs<8>(row + T::own_h(h, thread % T::kSplit), cost + h / 2);
        } else {
            const half* row = from + T::place(x / T::kSlices * kCount) + q * T::kUnits * kCount;
#pragma unroll
            for (int h = 0; h < T::kH; h++) load_costs<kCount>(row + (h << (16 - kB - In)), cost + h * kCount / 2);
        }
        const auto candidate = [&](int h, int v) {
            half2 before;
            if constexpr (T::kTransposed) {
                const half2 two = as_half2(cost[h / 2]);
                before = h & 1 ? __high2half2(two) : __low2half2(two);
            } else if constexpr (In == kB) {
                before = as_half2(cost[h * kCount / 2 + v / T::kI]);
            } else {
                const uint32_t* two = cost + h * kCount / 2 + v / T::kI * 2;
                const bool high = T::kSlices == 1 ? v % T::kI >> In : upper;
                before = as_half2(__byte_perm(two[0], two[1], high ? 0x7632 : 0x5410));
            }
            const half2 d = __hadd2(code[(q * T::kH + h) * T::kOut + v], minus_weight);
            return __hfma2(d, d, before);
        };
#pragma unroll
        for (int p = 0; p < kNext; p++) {
            half2 best[T::kOut];
#pragma unroll
            for (int v = 0; v < T::kOut; v++) best[v] = candidate(p, v);
#pragma unroll
            for (int h = p + kNext; h < T::kH; h += 2 * kNext) {
#pragma unroll
                for (int v = 0; v < T::kOut; v++) {
                    best[v] = __hmin2(best[v], candidate(h, v));  // pairs of minima fuse
                    if (h + kNext < T::kH) best[v] = __hmin2(best[v], candidate(h + kNext, v));
                }
            }
#pragma unroll
            for (int other = 1; other < T::kSplit; other *= 2) {
                best[0] = __hmin2(best[0], as_half2(__shfl_xor_sync(~0u, as_bits(best[0]), other)));
            }
            if (extra.notes) {
#pragma unroll
                for (int v = 0; v < T::kOut; v++) least = __hmin2(least, best[v]);
            }
            if (extra.subtracts) {
#pragma unroll
                for (int v = 0; v < T::kOut; v++) best[v] = __hsub2(best[v], least);
            }
            if constexpr (T::kTransposed) {
                if (thread % T::kSplit == 0) {
                    const int low = T::place(2 * x), high = T::place(2 * x + 1);
                    to[low] = __low2half(best[0]), to[high] = __high2half(best[0]);
                    if (extra.keeps) extra.keep[low] = __low2half(best[0]), extra.keep[high] = __high2half(best[0]);
                }
            } else {
                uint32_t words[T::kOut];  // [U, I] of both halves
#pragma unroll
                for (int v = 0; v < T::kOut; v += 2) {
                    const int even = (v / T::kI * 2 * T::kI + v % T::kI) / 2, odd = even + T::kI / 2;
                    words[even] = as_bits(__lows2half2(best[v], best[v + 1]));
                    words[odd] = as_bits(__highs2half2(best[v], best[v + 1]));
                }
                const int node = x / T::kSlices * (T::kU << kB) + x % T::kSlices * T::kI;
                const int first = T::place(node), second = T::place(node + (1 << T::kSwap));
                const int offset = (p << (16 - kB)) + q * T::kUnits * T::kU * T::kI;
                store_costs<T::kOut / 2, false>(to + first + offset, words);
                store_costs<T::kOut / 2, false>(to + second + offset, words + T::kOut / 2);
                if (extra.keeps) {
                    store_costs<T::kOut / 2, true>(extra.keep + first + offset, words);
                    store_costs<T::kOut / 2, true>(extra.keep + second + offset, words + T::kOut / 2);
                }
            }
        }
    }
    if (extra.notes) {
        const half low = __hmin(__low2half(least), __high2half(least));
        const unsigned smallest = __reduce_min_sync(~0u, static_cast<unsigned>(__half_as_ushort(low)));
        if (thread % 32 == 0) atomicMin(extra.smallest, smallest);
    }
}

}  // namespace
}  // namespace moefit
