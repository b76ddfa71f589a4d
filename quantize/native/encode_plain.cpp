// Build of the encoder for every x86-64 (16 fixed-point or 4 float lanes).
#include <emmintrin.h>

#include "encode_kernel.h"

namespace moefit {
namespace {

struct PlainBytes {
    using Cost = uint8_t;
    using Code = int16_t;
    static constexpr int N = 16;
    static constexpr uint8_t kCap = kMost;
    static constexpr int code_of(int lane) { return before_packing(lane, N); }
    static __m128i load(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
    static __m128i weight(int16_t v) { return _mm_set1_epi16(v); }
    static __m128i set1(uint8_t v) { return _mm_set1_epi8(static_cast<char>(v)); }
    static void store(uint8_t* p, __m128i v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v); }
    static __m128i add(__m128i a, __m128i b) { return _mm_add_epi8(a, b); }
    static __m128i sub(__m128i a, __m128i b) { return _mm_sub_epi8(a, b); }
    static __m128i min(__m128i a, __m128i b) { return _mm_min_epu8(a, b); }
    static __m128i mulhrs(__m128i d) {  // (d d + 2^14) >> 15 from both halves of the product
        const __m128i low = _mm_add_epi16(_mm_srli_epi16(_mm_mullo_epi16(d, d), 14), _mm_set1_epi16(1));
        return _mm_add_epi16(_mm_slli_epi16(_mm_mulhi_epi16(d, d), 1), _mm_srli_epi16(low, 1));
    }
    static __m128i square(const int16_t* codes, __m128i w) {
        return _mm_packs_epi16(mulhrs(_mm_sub_epi16(load(codes), w)), mulhrs(_mm_sub_epi16(load(codes + 8), w)));
    }
    // The N >> D costs at p, again and again.
    template <int D>
    static __m128i repeat(const uint8_t* p) {
        if constexpr (D >= 4) return set1(*p);
        else if constexpr (D == 3) return _mm_set1_epi16(read<int16_t>(p));
        else if constexpr (D == 2) return _mm_set1_epi32(read<int32_t>(p));
        else return _mm_set1_epi64x(read<int64_t>(p));
    }
    template <int D>
    static __m128i natural(__m128i v) {  // each turn moves the top bit of the lane numbers to the bottom
        if constexpr ((1 << D) < N)
            for (int i = 0; i < D; i++) v = _mm_unpacklo_epi8(v, _mm_srli_si128(v, 8));
        return v;
    }
};

struct PlainFloat {
    using Cost = float;
    using Code = float;
    static constexpr int N = 4;
    static constexpr float kCap = kFar;
    static constexpr int code_of(int lane) { return lane; }
    typedef float Vec __attribute__((vector_size(16)));
    static Vec set1(float v) { return Vec{v, v, v, v}; }
    static Vec weight(float v) { return set1(v); }
    static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec min(Vec a, Vec b) { return b < a ? b : a; }
    static Vec square(const float* codes, Vec w) {
        Vec d;
        std::memcpy(&d, codes, sizeof d);
        d -= w;
        return d * d;
    }
    template <int D>
    static Vec repeat(const float* p) {
        if constexpr ((1 << D) >= N) return set1(*p);
        Vec r;
        for (int i = 0; i < N; i++) r[i] = p[i & ((N >> D) - 1)];
        return r;
    }
    template <int D>
    static Vec natural(Vec v) {
        Vec r;
        for (int i = 0; i < N; i++) r[i] = v[lane_of(i, N, D)];
        return r;
    }
};

}  // namespace

void encode_plain(const EncodeJob& job) { encode_with<PlainBytes, PlainFloat>(job); }

}  // namespace moefit
