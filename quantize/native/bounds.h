// Costs of all paths at once: the dense Viterbi recursion over the 65,536 states, on vectors of type V.
//
// A step over position t takes costs of the nodes entering t to costs of the nodes entering t + 1:
//     to[s mod M] = min over s of from[s >> D(t)] + (codebook[s] - weight_t)^2,   M = 2^(16 - D(t+1))
//
// Costs are float32, or 8 bits wide: a square is (d d + 2^14) >> 15 units, d a difference of 16-bit codes, and at most
// 128; a kept cost is at most 127 and counts from the smallest of the row before. Where d wraps round it is too large
// to matter even so. A tile with a step that lifts all costs by more than 48 units does not fit.
//
// The vector ports are the limit, so the inner loop has no shuffle in it: N states next to each other start from
// N >> D(t) nodes next to each other, and lie in an order in which these nodes' costs are simply repeated. The minimum
// is put into its natural order once.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>

#include "encode.h"

namespace moefit {
namespace {  // a copy per translation unit: the linker must not give AVX-512 code to a CPU without it

// Zeroed memory aligned to a huge page: no vector access crosses a cache line, and walking megabytes of costs does
// not miss the TLB.
template <class T>
class Buffer {
    struct Free {
        void operator()(void* p) const { std::free(p); }
    };
    std::unique_ptr<T[], Free> data_;

   public:
    explicit Buffer(size_t count) {
        constexpr size_t page = size_t{1} << 21;
        const size_t bytes = (count * sizeof(T) + page - 1) / page * page;
        void* p = std::aligned_alloc(page, bytes);
        if (!p) throw std::bad_alloc();
        madvise(p, bytes, MADV_HUGEPAGE);  // advice only: without huge pages it is slower, not wrong
        std::memset(p, 0, bytes);
        data_.reset(static_cast<T*>(p));
    }
    T* data() const { return data_.get(); }
    T& operator[](size_t i) const { return data_[i]; }
};

template <class T>
T read(const void* p) {
    T x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// Lane of an N-lane vector for number i of N neighbouring states: their D symbol bits move to the top.
constexpr int lane_of(int i, int N, int D) {
    return (1 << D) >= N ? i : (i & ((1 << D) - 1)) * (N >> D) + (i >> D);
}

// Where the code for byte `lane` lies, so that packing words to bytes, which goes by 128-bit lanes, puts it there.
constexpr int before_packing(int lane, int N) { return (lane & 8 ? N / 2 : 0) + lane / 16 * 8 + lane % 8; }

constexpr uint8_t kMost = 127;
constexpr float kFar = std::numeric_limits<float>::infinity();

template <class V>
class Bounds {
    using Code = typename V::Code;
    static constexpr bool kFixed = std::is_same_v<typename V::Cost, uint8_t>;
    static constexpr int N = V::N;

   public:
    using Cost = typename V::Cost;

    // values: in the bit order of the side whose bounds these are.
    Bounds(const float* values, const EncodeJob& job)
        : scale_(job.scale), unit_(32768.0f / (job.scale * job.scale)), narrow_(job.twice_k / 2),
          codes_(size_t{kStates} * (1 + job.twice_k % 2)) {
        for (int order = 0; order <= job.twice_k % 2; order++) {  // one for each width of a symbol
            const int in = narrow_ + order, out = job.twice_k - in, nodes = kStates >> out;
            for (int s = 0; s < kStates; s++) {  // in the order in which step() reads them
                const int vector = (s % nodes / N << out) + s / nodes;
                codes_[order * kStates + vector * N + V::code_of(lane_of(s % N, N, in))] = code(values[s]);
            }
        }
    }

    // A kept cost in float; `offset` units were subtracted from it on the way.
    float cost(Cost kept, int offset) const {
        return kFixed ? static_cast<float>(static_cast<int>(kept) + offset) * unit_ : static_cast<float>(kept);
    }

    // Units that step() subtracts.
    static int offset(Cost smallest) { return kFixed ? static_cast<int>(smallest) : 0; }
    static bool fits(Cost smallest) { return !kFixed || smallest <= 48; }

    // Fills `to`, and returns its smallest cost; `smallest` is that of `from`.
    template <int Din, int Dout>
    Cost step(float weight, const Cost* from, Cost smallest, Cost* to) const {
        constexpr int M = 1 << (16 - Dout), H = 1 << Dout;
        const Code* codes = codes_.data() + (Din == narrow_ ? 0 : kStates);
        const auto w = V::weight(code(weight));
        const auto subtract = V::set1(smallest);
        auto least = V::set1(V::kCap);
        for (int m = 0; m < M; m += N) {
            auto best = V::set1(V::kCap);
#pragma GCC unroll 16
            for (int h = 0; h < H; h++, codes += N)
                best = V::min(best, V::add(V::template repeat<Din>(from + h * (M >> Din) + (m >> Din)),
                                           V::square(codes, w)));
            if constexpr (kFixed) best = V::sub(best, subtract);
            V::store(to + m, V::template natural<Din>(best));
            least = V::min(least, best);
        }
        Cost lanes[N];
        V::store(lanes, least);
        return *std::min_element(lanes, lanes + N);
    }

   private:
    Code code(float x) const {
        return static_cast<Code>(kFixed ? std::clamp(std::nearbyint(x * scale_), -32767.0f, 32767.0f) : x);
    }

    const float scale_, unit_;
    const int narrow_;
    const Buffer<Code> codes_;
};

}  // namespace
}  // namespace moefit
