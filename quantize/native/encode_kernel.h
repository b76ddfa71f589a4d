// The trellis encoder, written once over a vector type V and compiled for each instruction set.
//
// Terms (QTIP, and docs/exl3.md): S_t = (S_{t-1} << D(t) | symbol_t) mod 2^16 is the state at ring position t and
// codebook[S_t] its value. The node entering position t is S_t >> D(t): the bits S_{t-1} and S_t share.
//
// Only costs are kept in the forward pass, for all nodes and steps. Tracing back evaluates the 2^D candidates of the
// 256 nodes on the path again, which costs nothing beside the 65,536 of each forward step and spares the inner loop
// its index bookkeeping.
//
// Costs are float32, or 16-bit fixed point with 512 units per 1.0. At K = 3 a weight costs 9 units on average and the
// rounding raises the mean squared error by 0.02 % (tests/quantize/test_encode.py measures it), less than the fp16
// costs of exllamav3's kernel. The ranges are chosen so that nothing saturates inside the loop, because AVX-512 runs
// saturating arithmetic on one port only: a kept cost is at most kCap = 64.0, a squared distance at most 64.0, and
// kept costs are stored minus 32768 so that their sum fits a signed word.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "encode.h"

namespace moefit {
namespace {  // a copy per translation unit: the linker must not give AVX-512 code to a CPU without it

// Zeroed memory aligned to a huge page: no vector access crosses a cache line, and walking the 4 MB of costs
// does not miss the TLB.
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
    Buffer(const T* from, size_t count) : Buffer(count) { std::memcpy(data_.get(), from, count * sizeof(T)); }
    T* data() const { return data_.get(); }
    T& operator[](size_t i) const { return data_[i]; }
};

// Scale of values and weights in fixed point. No codebook value reaches 4, so with |weight| <= 4 a difference fits
// 16 bits; a tile with a larger weight (a few in a thousand) is encoded in float32.
constexpr float kScale = 4096.0f, kFixedLimit = 4.0f;
constexpr int16_t kZero = -32768, kCap = -1;
constexpr int kRenormalize = 1024;  // subtract the smallest cost once it exceeds 2.0
constexpr int kPadding = 64;  // elements that a vector load may read past the last node

template <class V>
struct Fixed {
    using Cost = int16_t;
    using Weight = int16_t;
    static constexpr Cost kStart = kZero, kUnreachable = kCap;

    Buffer<int16_t> codes;

    explicit Fixed(const float* values) : codes(kStates) {
        for (int s = 0; s < kStates; s++) codes[s] = weight(values[s]);
    }
    static Weight weight(float w) { return static_cast<int16_t>(std::lrint(w * kScale)); }
    Cost candidate(Cost from, int state, Weight w) const {
        const int d = codes[state] - w;
        return static_cast<Cost>(from + ((d * d + (1 << 14)) >> 15));
    }

    // to[m] = min over h of from[s >> Din] + distance(code[s], w), s = h * M + m, at most kCap.
    template <int Din, int Dout>
    void step(Weight weight, const Cost* from, Cost* to) const {
        constexpr int M = 1 << (16 - Dout), H = 1 << Dout;
        const auto w = V::set1(weight);
        auto smallest = V::set1(kCap);
        for (int m = 0; m < M; m += V::N) {
            auto best = V::set1(kCap);
#pragma GCC unroll 16
            for (int h = 0; h < H; h++) {
                const auto d = V::sub(V::load(codes.data() + h * M + m), w);
                const auto cost = V::add(V::template expand<Din>(from + ((h * M + m) >> Din)), V::mulhrs(d, d));
                best = V::min(best, cost);
            }
            V::store(to + m, best);
            smallest = V::min(smallest, best);
        }
        const int grown = V::reduce_min(smallest) - kZero;
        if (grown <= kRenormalize) return;
        for (int m = 0; m < M; m++)  // rare; a capped cost stays, it may stand for "unreachable"
            if (to[m] != kCap) to[m] = static_cast<Cost>(to[m] - grown);
    }
};

template <class F>
struct Float {
    using Cost = float;
    using Weight = float;
    static constexpr Cost kStart = 0.0f, kUnreachable = std::numeric_limits<float>::infinity();

    const float* values;

    explicit Float(const float* v) : values(v) {}
    static Weight weight(float w) { return w; }
    Cost candidate(Cost from, int state, Weight w) const {
        const float d = values[state] - w;
        return from + d * d;
    }
    template <int Din, int Dout>
    void step(Weight weight, const Cost* from, Cost* to) const {
        constexpr int M = 1 << (16 - Dout), H = 1 << Dout;
        const auto w = F::set1(weight);
        for (int m = 0; m < M; m += F::N) {
            auto best = F::set1(kUnreachable);
#pragma GCC unroll 8
            for (int h = 0; h < H; h++) {
                const auto d = F::sub(F::load(values + h * M + m), w);
                best = F::min(best, F::add(F::template expand<Din>(from + ((h * M + m) >> Din)), F::mul(d, d)));
            }
            F::store(to + m, best);
        }
    }
};

template <class Metric>
class Encoder {
    using Cost = typename Metric::Cost;

   public:
    Encoder(const Metric& metric, int twice_k, int lead)
        : metric_(metric), twice_k_(twice_k), lead_(lead), stride_((kStates >> (twice_k >> 1)) + kPadding),
          costs_(static_cast<size_t>(kTile + 1) * stride_) {}

    // False when capped costs closed the ring on another node than it began with (fixed point only).
    bool encode(const float* tile, uint16_t* states) {
        for (int t = 0; t < kTile; t++) weights_[t] = Metric::weight(tile[t]);
        const int node = closing_node();
        std::fill_n(costs_.data(), nodes(0), Metric::kUnreachable);
        costs_[node] = Metric::kStart;
        for (int t = 0; t < kTile; t++) step(t, t);
        return trace(kTile, kTile, node, states) == node;
    }

   private:
    int width(int t) const { return symbol_width(t & (kTile - 1), twice_k_); }
    int nodes(int t) const { return kStates >> width(t); }  // nodes entering position t
    Cost* row(int i) { return costs_.data() + static_cast<size_t>(i) * stride_; }

    // The node entering position 0 on the best path over positions -lead .. lead-1 with both ends free.
    int closing_node() {
        std::fill_n(costs_.data(), nodes(-lead_), Metric::kStart);
        for (int i = 0; i < 2 * lead_; i++) step(i, i - lead_);
        const Cost* last = row(2 * lead_);
        const int end = static_cast<int>(std::min_element(last, last + nodes(lead_)) - last);
        return trace(2 * lead_, lead_, end, nullptr);
    }

    // Rows i and i + 1 hold the costs of the nodes entering positions t and t + 1.
    void step(int i, int t) {
        const auto w = weights_[t & (kTile - 1)];
        const Cost* from = row(i);
        Cost* to = row(i + 1);
        switch (width(t) * 16 + width(t + 1)) {
#define MOEFIT_STEP(a, b) case a * 16 + b: return metric_.template step<a, b>(w, from, to);
            MOEFIT_STEP(1, 1) MOEFIT_STEP(2, 2) MOEFIT_STEP(3, 3) MOEFIT_STEP(4, 4)
            MOEFIT_STEP(5, 5) MOEFIT_STEP(6, 6) MOEFIT_STEP(7, 7) MOEFIT_STEP(8, 8)
            MOEFIT_STEP(1, 2) MOEFIT_STEP(2, 1) MOEFIT_STEP(2, 3) MOEFIT_STEP(3, 2) MOEFIT_STEP(3, 4) MOEFIT_STEP(4, 3)
#undef MOEFIT_STEP
        }
    }

    // Walk back `steps` positions from the node leaving position `end_row - 1`; the first candidate wins ties.
    // end_row counts rows; in the closing search row i is position i - lead.
    int trace(int end_row, int steps, int node, uint16_t* states) {
        const int shift = states ? 0 : lead_;
        for (int i = end_row - 1; i >= end_row - steps; i--) {
            const int t = i - shift, in = width(t), out = width(t + 1), m = 16 - out;
            const auto w = weights_[t & (kTile - 1)];
            const Cost* from = row(i);
            int state = node;
            Cost best = metric_.candidate(from[node >> in], node, w);
            for (int h = 1; h < (1 << out); h++) {
                const int s = (h << m) | node;
                const Cost c = metric_.candidate(from[s >> in], s, w);
                if (c < best) best = c, state = s;
            }
            if (states) states[t] = static_cast<uint16_t>(state);
            node = state >> in;
        }
        return node;
    }

    const Metric& metric_;
    const int twice_k_, lead_, stride_;
    Buffer<Cost> costs_;  // [257, stride]
    typename Metric::Weight weights_[kTile];
};

// A metric and an encoder that a thread keeps between calls: LDLQ asks for a few tiles at a time, and filling 4 MB anew
// each time would cost a tenth of the work. Rebuilt when the codebook or the options change.
template <class Metric>
struct Workspace {
    Buffer<float> values;
    int twice_k, lead;
    Metric metric;
    Encoder<Metric> encoder;

    explicit Workspace(const EncodeJob& job)
        : values(job.values, kStates), twice_k(job.twice_k), lead(job.lead), metric(values.data()),
          encoder(metric, job.twice_k, job.lead) {}

    bool serves(const EncodeJob& job) const {
        return twice_k == job.twice_k && lead == job.lead &&
               std::memcmp(values.data(), job.values, kStates * sizeof(float)) == 0;
    }

    static Encoder<Metric>& of(const EncodeJob& job) {
        thread_local std::unique_ptr<Workspace> kept;
        if (!kept || !kept->serves(job)) {
            kept.reset();  // first: two would not fit where one does
            kept = std::make_unique<Workspace>(job);
        }
        return kept->encoder;
    }
};

template <class V, class F>
void encode_with(const EncodeJob& job) {
    Encoder<Fixed<V>>* fixed = job.fixed_point && job.count ? &Workspace<Fixed<V>>::of(job) : nullptr;
    Encoder<Float<F>>* full = nullptr;
    for (int64_t i = 0; i < job.count; i++) {
        const float* tile = job.tiles + i * kTile;
        uint16_t* states = job.states + i * kTile;
        const bool fits = std::all_of(tile, tile + kTile, [](float w) { return std::fabs(w) <= kFixedLimit; });
        if (fixed && fits && fixed->encode(tile, states)) continue;
        if (!full) full = &Workspace<Float<F>>::of(job);
        full->encode(tile, states);
    }
}

}  // namespace
}  // namespace moefit
