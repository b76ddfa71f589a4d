// The two searches, tracing back, and the kernel that runs them for all tiles. See encode.cu.
#pragma once
#include "step.cuh"

namespace moefit {
namespace {

struct Job {
    const float* tiles;    // [count, 256], ring order
    const uint4* codes;    // [2, kPairs / 4, kThreads]: pairs of each thread, forward and bit-reversed
    const half* table;     // [65536]
    half* rows;            // [blocks, rounds, Tiles, 2, kKept, kRow0]; slot 0 forward holds the row at the middle
    uint16_t* states;      // [count, 256]
    int64_t count;
    int lead;
    int rounds;            // between two tracings back
};

constexpr int kMostTiles = kWarps / 2;  // of a block between two tracings back: a warp for each direction

template <int TwoK, int Tiles>
struct Shared {
    using T = Trellis<TwoK>;
    half costs[Tiles][T::kRow0 + T::kRow1];  // rows entering even and odd positions; scratch of the tracers
    half2 minus_weight[Tiles][kRing];
    uint64_t stored[Tiles];                  // barriers
    uint64_t best[kWarps];
    uint32_t smallest[Tiles];
    int node[kMostTiles][2];                 // entering positions 0 and 128
};

__device__ __forceinline__ void load_codes(half2 (&code)[kPairs], const uint4* codes, int thread) {
#pragma unroll
    for (int i = 0; i < kPairs / 4; i++) {
        const uint4 v = codes[i * kThreads + thread];
        code[4 * i] = as_half2(v.x), code[4 * i + 1] = as_half2(v.y);
        code[4 * i + 2] = as_half2(v.z), code[4 * i + 3] = as_half2(v.w);
    }
}

template <class T>
__device__ __forceinline__ int reversed(int node) {  // entering an even position
    return static_cast<int>(__brev(node) >> (16 + T::kEven));
}

// The node with the smallest sum of costs; the lowest wins ties. All threads get it.
template <class T>
__device__ int meeting_node(const half* forward, const half* backward, uint64_t* scratch, int thread) {
    uint64_t best = ~0ull;
    constexpr int kBits = 16 - T::kEven;
    for (int i = thread; i < 1 << kBits; i += kThreads) {
        // Neighbouring threads differ in both the lowest and the highest bits: the reversed reads hit different banks.
        const int node = (i & 3) | i >> 5 << 2 | (i >> 2 & 7) << (kBits - 3);
        const float sum = __half2float(forward[T::place(node)]) + __half2float(backward[T::place(reversed<T>(node))]);
        best = min(best, static_cast<uint64_t>(__float_as_uint(sum)) << 32 | node);
    }
    for (int other = 16; other; other /= 2) best = min(best, __shfl_xor_sync(~0u, best, other));
    if (thread % 32 == 0) scratch[thread / 32] = best;
    __syncthreads();
    for (int i = 0; i < kWarps; i++) best = min(best, scratch[i]);
    return static_cast<int>(best);
}

// Both searches for `active` tiles, `stride` apart. Leaves the nodes in sh.node[at ..] and the kept rows in `rows`.
template <int TwoK, int Tiles>
__device__ __forceinline__ void search(const Job& job, Shared<TwoK, Tiles>& sh, half* rows, int64_t tile, int at) {
    using T = Trellis<TwoK>;
    constexpr int64_t kTileRows = 2 * T::kKept * T::kRow0;
    const int thread = threadIdx.x, active = Tiles > 1 && tile + gridDim.x >= job.count ? 1 : Tiles;
    for (int i = thread; i < active * kRing; i += kThreads) {
        const float w = job.tiles[(tile + i / kRing * gridDim.x) * kRing + i % kRing];
        sh.minus_weight[i / kRing][i % kRing] = __half2half2(clamped_minus(w));
    }
    half2 code[kPairs];
#pragma unroll 1
    for (int run = 0; run < 4; run++) {
        const bool backward = run & 1, pinned = run & 2;
        load_codes(code, job.codes + backward * kPairs / 4 * kThreads, thread);
        for (int s = 0; s < active; s++) {
            auto* row = reinterpret_cast<uint32_t*>(sh.costs[s]);
            const uint32_t start = pinned ? kUnreachable * 0x10001u : 0u;
            for (int i = thread; i < T::kRow0 / 2; i += kThreads) row[i] = start;
            if (thread == 0) sh.smallest[s] = kUnreachable;
        }
        __syncthreads();
        if (pinned && thread < active) {
            const int node = sh.node[at + thread][0];
            sh.costs[thread][T::place(backward ? reversed<T>(node) : node)] = __ushort_as_half(0);
        }
        __syncthreads();

        const int steps = pinned ? kRing / 2 : job.lead, direction = backward ? -1 : 1;
        int t = (pinned ? kRing / 2 : 0) + (backward ? steps - 1 : -steps);
        half* keep = rows + backward * T::kKept * T::kRow0;
#pragma unroll 1
        for (int u = 0; u < steps; u += 2) {
#pragma unroll
            for (int s = 0; s < Tiles; s++) {
                if (s && active == 1) break;
                Extra extra;
                extra.notes = (u + 2) % kRenormalize == 0;
                extra.keeps = T::kKeep == 1 && pinned;
                extra.smallest = &sh.smallest[s];
                extra.keep = keep + s * kTileRows + (u + 1) * T::kRow0;
                barrier_wait(&sh.stored[s], 1);
                step<T, T::kEven, T::kOdd>(code, sh.minus_weight[s][t & (kRing - 1)], sh.costs[s],
                                           sh.costs[s] + T::kRow0, thread, extra);
                barrier_arrive(&sh.stored[s]);
            }
            t += direction;
#pragma unroll
            for (int s = 0; s < Tiles; s++) {
                if (s && active == 1) break;
                Extra extra;
                extra.subtracts = (u + 2) % kRenormalize == 0;
                extra.keeps = pinned && (u + 2) % T::kKeep == 0 && u + 2 < steps;
                extra.smallest = &sh.smallest[s];
                extra.keep = keep + s * kTileRows + (u + 2) / T::kKeep * T::kRow0;
                barrier_wait(&sh.stored[s], 0);
                step<T, T::kOdd, T::kEven>(code, sh.minus_weight[s][t & (kRing - 1)], sh.costs[s] + T::kRow0,
                                           sh.costs[s], thread, extra);
                if (u % kRenormalize == 0 && thread == 0) sh.smallest[s] = kUnreachable;
                barrier_arrive(&sh.stored[s]);
            }
            t += direction;
        }
        __syncthreads();
        for (int s = 0; s < active; s++) {
            auto* forward = rows + s * kTileRows;
            if (backward) {
                const int node = meeting_node<T>(forward, sh.costs[s], sh.best, thread);
                if (thread == 0) sh.node[at + s][pinned] = node;
            } else {
                for (int i = thread; i < T::kRow0; i += kThreads) forward[i] = sh.costs[s][i];
            }
            __syncthreads();
        }
    }
}

// Traces back one direction of one tile, with one warp. Steps are counted from the end of the ring: step u leads from
// row u to row u + 1. The paths of L steps into a node `at` of row `end` are numbered by the L dropped symbols, the
// earliest on top; best[L][path] is the cost of the cheapest path that goes on so (upper half) and the symbol that it
// drops next (lower half).
template <class T>
struct Tracer {
    const half* table;
    const float* weights;
    uint16_t* states;
    const half* rows;
    uint32_t* best;
    int lane;
    bool backward;

    static constexpr int bits(int level) {  // of a path number
        int sum = 0;
        for (int l = 0; l < level; l++) sum += T::width(l);
        return sum;
    }
    static constexpr int first(int level) {  // where best[level] begins
        int sum = 0;
        for (int l = 0; l < level; l++) sum += 1 << bits(l);
        return sum;
    }
    static_assert(kWarps * first(T::kKeep) * sizeof(uint32_t) <= (T::kRow0 + T::kRow1) * sizeof(half) || T::kB >= 5);

    __device__ int position(int u) const { return backward ? kRing - 1 - u : u; }

    // The state of step end - Level on a path into `at`.
    template <int Level>
    __device__ static int state(int path, int at) {
        return ((path << (16 - T::width(0)) | at) >> (bits(Level) - T::width(0))) & (kStates - 1);
    }

    // Cost above symbol: the smallest key is the cheapest edge, the lowest symbol wins ties.
    template <int Level, class From>
    __device__ uint32_t key(int symbol, int group, int at, half minus_weight, From from) const {
        const int path = symbol << bits(Level - 1) | group, s = state<Level>(path, at);
        const half d = __hadd(__ldg(table + (backward ? __brev(s) >> 16 : s)), minus_weight);
        const half cost = __hfma(d, d, from(s >> T::width(Level), path));
        return static_cast<uint32_t>(__half_as_ushort(cost)) << 16 | symbol;
    }

    template <int Level, class From>
    __device__ void evaluate(int end, int at, From from) {
        constexpr int kSymbols = 1 << T::width(Level - 1), kGroups = 1 << bits(Level - 1);
        const half minus_weight = clamped_minus(__ldg(weights + position(end - Level)));
        if constexpr (kSymbols > 32) {
            static_assert(kGroups == 1);
            uint32_t smallest = ~0u;
#pragma unroll 4
            for (int symbol = lane; symbol < kSymbols; symbol += 32) {
                smallest = min(smallest, key<Level>(symbol, 0, at, minus_weight, from));
            }
            smallest = __reduce_min_sync(~0u, smallest);
            if (lane == 0) best[0] = smallest;
        } else {
#pragma unroll
            for (int edge = 0; edge < kGroups * kSymbols; edge += 32) {
                const int symbol = lane % kSymbols, group = (edge + lane) / kSymbols;
                uint32_t smallest = group < kGroups ? key<Level>(symbol, group, at, minus_weight, from) : ~0u;
#pragma unroll
                for (int other = 1; other < kSymbols; other *= 2) {
                    smallest = min(smallest, __shfl_xor_sync(~0u, smallest, other));
                }
                if (symbol == 0 && group < kGroups) best[first(Level - 1) + group] = smallest;
            }
        }
        __syncwarp();
        if constexpr (Level > 1) {
            const uint32_t* costs = best + first(Level - 1);
            evaluate<Level - 1>(end, at, [costs](int, int path) { return __ushort_as_half(costs[path] >> 16); });
        }
    }

    // Follows the cheapest path, writes its states and returns its first node.
    template <int Level>
    __device__ int follow(int end, int path, int at) const {
        path |= (best[first(Level - 1) + path] & 0xffff) << bits(Level - 1);
        const int s = state<Level>(path, at);
        if (lane == 0) states[position(end - Level)] = static_cast<uint16_t>(backward ? __brev(s) >> 16 : s);
        if constexpr (Level < T::kKeep) {
            return follow<Level + 1>(end, path, at);
        } else {
            return s >> T::width(Level);
        }
    }

    __device__ void run(int node, int middle) {
        const int start = backward ? reversed<T>(node) : node;
        int at = backward ? reversed<T>(middle) : middle;
        for (int end = kRing / 2; end > 0; end -= T::kKeep) {
            const half* row = rows + (end / T::kKeep - 1) * T::kRow0;
            evaluate<T::kKeep>(end, at, [=](int from, int) {
                if (end == T::kKeep) return __ushort_as_half(from == start ? 0 : kUnreachable);
                return __ldcg(row + T::place(from));
            });
            at = follow<1>(end, 0, at);
            __syncwarp();
        }
    }
};

template <int TwoK, int Tiles>
__global__ void __launch_bounds__(kThreads, 1) encode_kernel(const Job job) {
    using T = Trellis<TwoK>;
    constexpr int64_t kTileRows = 2 * T::kKept * T::kRow0;
    extern __shared__ uint4 memory[];
    auto& sh = *reinterpret_cast<Shared<TwoK, Tiles>*>(memory);
    half* rows = job.rows + blockIdx.x * job.rounds * Tiles * kTileRows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < Tiles) barrier_init(&sh.stored[threadIdx.x], kWarps);
    __syncthreads();
    for (int64_t first = blockIdx.x; first < job.count;) {
        const int64_t batch = first;
        int tiles = 0;
#pragma unroll 1
        for (; tiles < job.rounds * Tiles && first < job.count; tiles += Tiles, first += int64_t{Tiles} * gridDim.x) {
            search<TwoK, Tiles>(job, sh, rows + tiles * kTileRows, first, tiles);
        }
        const int64_t tile = batch + int64_t{warp / 2} * gridDim.x;
        if (warp / 2 < tiles && tile < job.count) {
            const bool backward = warp % 2;
            auto* best = reinterpret_cast<uint32_t*>(sh.costs) + warp * Tracer<T>::first(T::kKeep);
            Tracer<T> tracer{job.table, job.tiles + tile * kRing, job.states + tile * kRing,
                             rows + (warp / 2 * 2 + backward) * (T::kKept * T::kRow0), best, lane, backward};
            tracer.run(sh.node[warp / 2][0], sh.node[warp / 2][1]);
        }
        __syncthreads();
    }
}

}  // namespace
}  // namespace moefit
