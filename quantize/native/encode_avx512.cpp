// AVX-512 (F, BW, VL, DQ) build of the encoder (32 fixed-point or 16 float lanes).
#include <immintrin.h>

#include "encode_kernel.h"

namespace moefit {
namespace {

template <int D>
inline __m512i word_pattern() {
    alignas(64) int16_t p[32];
    for (int i = 0; i < 32; i++) {
        const int word = i >> D;
        p[i] = static_cast<int16_t>((2 * word) | ((2 * word + 1) << 8));
    }
    return _mm512_load_si512(p);
}

struct Avx512Int16 {
    static constexpr int N = 32;
    static __m512i set1(int16_t v) { return _mm512_set1_epi16(v); }
    static __m512i load(const int16_t* p) { return _mm512_loadu_si512(p); }
    static void store(int16_t* p, __m512i v) { _mm512_storeu_si512(p, v); }
    static __m512i sub(__m512i a, __m512i b) { return _mm512_sub_epi16(a, b); }
    static __m512i add(__m512i a, __m512i b) { return _mm512_add_epi16(a, b); }
    static __m512i mulhrs(__m512i a, __m512i b) { return _mm512_mulhrs_epi16(a, b); }
    static __m512i min(__m512i a, __m512i b) { return _mm512_min_epi16(a, b); }
    template <int D>
    static __m512i expand(const int16_t* p) {
        if constexpr (D >= 5) {
            return _mm512_set1_epi16(*p);
        } else if constexpr (D == 1) {
            const __m512i index = word_index<1>();
            return _mm512_permutexvar_epi16(index, _mm512_castsi256_si512(
                _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
        } else {
            // A broadcasting load costs no arithmetic port; the shuffle then stays inside 128-bit lanes.
            __m512i x;
            if constexpr (D == 2) {
                x = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
            } else if constexpr (D == 3) {
                int64_t v;
                std::memcpy(&v, p, sizeof v);
                x = _mm512_set1_epi64(v);
            } else {
                int32_t v;
                std::memcpy(&v, p, sizeof v);
                x = _mm512_set1_epi32(v);
            }
            return _mm512_shuffle_epi8(x, word_pattern<D>());
        }
    }
    static int16_t reduce_min(__m512i a) {
        const __m256i y = _mm256_min_epi16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
        const __m128i x = _mm_min_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
        const __m128i sign = _mm_set1_epi16(kZero);  // minpos is unsigned
        return static_cast<int16_t>(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, sign)), 0) + kZero);
    }

   private:
    template <int D>
    static __m512i word_index() {
        alignas(64) int16_t p[32];
        for (int i = 0; i < 32; i++) p[i] = static_cast<int16_t>(i >> D);
        return _mm512_load_si512(p);
    }
};

struct Avx512Float {
    static constexpr int N = 16;
    static __m512 set1(float v) { return _mm512_set1_ps(v); }
    static __m512 load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, __m512 v) { _mm512_storeu_ps(p, v); }
    static __m512 sub(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
    static __m512 mul(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
    static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
    static __m512 min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
    template <int D>
    static __m512 expand(const float* p) {
        if constexpr (D >= 4) return _mm512_set1_ps(*p);
        const __m512i index = _mm512_srli_epi32(
            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), D);
        return _mm512_permutexvar_ps(index, _mm512_loadu_ps(p));
    }
};

}  // namespace

void encode_avx512(const EncodeJob& job) { encode_with<Avx512Int16, Avx512Float>(job); }

}  // namespace moefit
