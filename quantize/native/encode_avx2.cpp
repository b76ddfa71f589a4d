// AVX2 build of the encoder (16 fixed-point or 8 float lanes).
#include <immintrin.h>

#include "encode_kernel.h"

namespace moefit {
namespace {

// Byte shuffle that repeats 16-bit word (first + i >> D) of a 128-bit lane at place i.
constexpr int word_bytes(int word) { return (2 * word) | ((2 * word + 1) << 8); }

template <int D>
inline __m256i word_pattern() {
    alignas(32) int16_t p[16];
    for (int i = 0; i < 16; i++) p[i] = static_cast<int16_t>(word_bytes(i >> D));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(p));
}

struct Avx2Int16 {
    static constexpr int N = 16;
    static __m256i set1(int16_t v) { return _mm256_set1_epi16(v); }
    static __m256i load(const int16_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(int16_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi16(a, b); }
    static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
    static __m256i mulhrs(__m256i a, __m256i b) { return _mm256_mulhrs_epi16(a, b); }
    static __m256i min(__m256i a, __m256i b) { return _mm256_min_epi16(a, b); }
    template <int D>
    static __m256i expand(const int16_t* p) {
        if constexpr (D >= 4) {
            return _mm256_set1_epi16(*p);
        } else {
            __m256i x;
            if constexpr (D == 3) {
                int32_t v;
                std::memcpy(&v, p, sizeof v);
                x = _mm256_set1_epi32(v);
            } else if constexpr (D == 2) {
                int64_t v;
                std::memcpy(&v, p, sizeof v);
                x = _mm256_set1_epi64x(v);
            } else {
                x = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
            }
            return _mm256_shuffle_epi8(x, word_pattern<D>());
        }
    }
    static int16_t reduce_min(__m256i a) {
        const __m128i sign = _mm_set1_epi16(kZero);  // minpos is unsigned
        const __m128i x = _mm_min_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
        return static_cast<int16_t>(_mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(x, sign)), 0) + kZero);
    }
};

struct Avx2Float {
    static constexpr int N = 8;
    static __m256 set1(float v) { return _mm256_set1_ps(v); }
    static __m256 load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
    static __m256 sub(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
    static __m256 mul(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
    static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
    static __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
    template <int D>
    static __m256 expand(const float* p) {
        if constexpr (D >= 3) return _mm256_set1_ps(*p);
        const __m256i index = _mm256_srli_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), D);
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(p), index);
    }
};

}  // namespace

void encode_avx2(const EncodeJob& job) { encode_with<Avx2Int16, Avx2Float>(job); }

}  // namespace moefit
