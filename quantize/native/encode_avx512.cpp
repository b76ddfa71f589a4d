// AVX-512 (F, BW, VL, DQ, VBMI) build of the encoder (64 fixed-point or 16 float lanes).
#include <immintrin.h>

#include "encode_kernel.h"

namespace moefit {
namespace {

struct Avx512Bytes {
    using Cost = uint8_t;
    using Code = int16_t;
    static constexpr int N = 64;
    static constexpr uint8_t kCap = kMost;
    static constexpr int code_of(int lane) { return before_packing(lane, N); }
    static __m512i weight(int16_t v) { return _mm512_set1_epi16(v); }
    static __m512i set1(uint8_t v) { return _mm512_set1_epi8(static_cast<char>(v)); }
    static void store(uint8_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
    static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi8(a, b); }
    static __m512i sub(__m512i a, __m512i b) { return _mm512_sub_epi8(a, b); }
    static __m512i min(__m512i a, __m512i b) { return _mm512_min_epu8(a, b); }
    static __m512i square(const int16_t* codes, __m512i w) {
        const __m512i a = _mm512_sub_epi16(_mm512_loadu_si512(codes), w);
        const __m512i b = _mm512_sub_epi16(_mm512_loadu_si512(codes + 32), w);
        return _mm512_packs_epi16(_mm512_mulhrs_epi16(a, a), _mm512_mulhrs_epi16(b, b));
    }
    // The N >> D costs at p, again and again. Loads that broadcast four bytes or more need no arithmetic port.
    template <int D>
    static __m512i repeat(const uint8_t* p) {
        if constexpr (D >= 6) return set1(*p);
        else if constexpr (D == 5) return _mm512_set1_epi16(read<int16_t>(p));
        else if constexpr (D == 4) return _mm512_set1_epi32(read<int32_t>(p));
        else if constexpr (D == 3) return _mm512_set1_epi64(read<int64_t>(p));
        else if constexpr (D == 2) return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        else return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    template <int D>
    static __m512i natural(__m512i v) {
        if constexpr ((1 << D) >= N) return v;
        alignas(64) int8_t lane[N];
        for (int i = 0; i < N; i++) lane[i] = static_cast<int8_t>(lane_of(i, N, D));
        return _mm512_permutexvar_epi8(_mm512_load_si512(lane), v);
    }
};

struct Avx512Float {
    using Cost = float;
    using Code = float;
    static constexpr int N = 16;
    static constexpr float kCap = kFar;
    static constexpr int code_of(int lane) { return lane; }
    static __m512 set1(float v) { return _mm512_set1_ps(v); }
    static __m512 weight(float v) { return set1(v); }
    static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
    static __m512 min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
    static __m512 square(const float* codes, __m512 w) {
        const __m512 d = _mm512_sub_ps(_mm512_loadu_ps(codes), w);
        return _mm512_mul_ps(d, d);
    }
    template <int D>
    static __m512 repeat(const float* p) {
        if constexpr (D >= 4) return _mm512_set1_ps(*p);
        else if constexpr (D == 3) return _mm512_castpd_ps(_mm512_set1_pd(read<double>(p)));
        else if constexpr (D == 2) return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
        else return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
    }
    template <int D>
    static __m512 natural(__m512 v) {
        if constexpr ((1 << D) >= N) return v;
        alignas(64) int32_t lane[N];
        for (int i = 0; i < N; i++) lane[i] = lane_of(i, N, D);
        return _mm512_permutexvar_ps(_mm512_load_si512(lane), v);
    }
};

}  // namespace

void encode_avx512(const EncodeJob& job) { encode_with<Avx512Bytes, Avx512Float>(job); }

}  // namespace moefit
