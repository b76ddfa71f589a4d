// AVX2 build of the encoder (32 fixed-point or 8 float lanes).
#include <immintrin.h>

#include "encode_kernel.h"

namespace moefit {
namespace {

struct Avx2Bytes {
    using Cost = uint8_t;
    using Code = int16_t;
    static constexpr int N = 32;
    static constexpr uint8_t kCap = kMost;
    static constexpr int code_of(int lane) { return before_packing(lane, N); }
    static __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
    static __m256i weight(int16_t v) { return _mm256_set1_epi16(v); }
    static __m256i set1(uint8_t v) { return _mm256_set1_epi8(static_cast<char>(v)); }
    static void store(uint8_t* p, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
    static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi8(a, b); }
    static __m256i sub(__m256i a, __m256i b) { return _mm256_sub_epi8(a, b); }
    static __m256i min(__m256i a, __m256i b) { return _mm256_min_epu8(a, b); }
    static __m256i square(const int16_t* codes, __m256i w) {
        const __m256i a = _mm256_sub_epi16(load(codes), w), b = _mm256_sub_epi16(load(codes + 16), w);
        return _mm256_packs_epi16(_mm256_mulhrs_epi16(a, a), _mm256_mulhrs_epi16(b, b));
    }
    // The N >> D costs at p, again and again.
    template <int D>
    static __m256i repeat(const uint8_t* p) {
        if constexpr (D >= 5) return set1(*p);
        else if constexpr (D == 4) return _mm256_set1_epi16(read<int16_t>(p));
        else if constexpr (D == 3) return _mm256_set1_epi32(read<int32_t>(p));
        else if constexpr (D == 2) return _mm256_set1_epi64x(read<int64_t>(p));
        else return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    template <int D>
    static __m256i natural(__m256i v) {
        if constexpr ((1 << D) >= N) return v;
        alignas(32) int8_t same[N], other[N];  // where the byte comes from: this half, or the other one
        for (int i = 0; i < N; i++) {
            const int from = lane_of(i, N, D);
            same[i] = static_cast<int8_t>(from / 16 == i / 16 ? from % 16 : -1);
            other[i] = static_cast<int8_t>(from / 16 == i / 16 ? -1 : from % 16);
        }
        const __m256i swapped = _mm256_permute4x64_epi64(v, 0x4E);
        return _mm256_or_si256(_mm256_shuffle_epi8(v, load(same)), _mm256_shuffle_epi8(swapped, load(other)));
    }
};

struct Avx2Float {
    using Cost = float;
    using Code = float;
    static constexpr int N = 8;
    static constexpr float kCap = kFar;
    static constexpr int code_of(int lane) { return lane; }
    static __m256 set1(float v) { return _mm256_set1_ps(v); }
    static __m256 weight(float v) { return set1(v); }
    static void store(float* p, __m256 v) { _mm256_storeu_ps(p, v); }
    static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
    static __m256 min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
    static __m256 square(const float* codes, __m256 w) {
        const __m256 d = _mm256_sub_ps(_mm256_loadu_ps(codes), w);
        return _mm256_mul_ps(d, d);
    }
    template <int D>
    static __m256 repeat(const float* p) {
        if constexpr (D >= 3) return _mm256_set1_ps(*p);
        else if constexpr (D == 2) return _mm256_castpd_ps(_mm256_set1_pd(read<double>(p)));
        else return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
    }
    template <int D>
    static __m256 natural(__m256 v) {
        if constexpr ((1 << D) >= N) return v;
        alignas(32) int32_t lane[N];
        for (int i = 0; i < N; i++) lane[i] = lane_of(i, N, D);
        return _mm256_permutevar8x32_ps(v, _mm256_load_si256(reinterpret_cast<const __m256i*>(lane)));
    }
};

}  // namespace

void encode_avx2(const EncodeJob& job) { encode_with<Avx2Bytes, Avx2Float>(job); }

}  // namespace moefit
