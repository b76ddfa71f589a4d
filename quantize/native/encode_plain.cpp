// Portable build of the encoder: portable vectors, which the compiler turns into what the baseline has.
#include "encode_kernel.h"

namespace moefit {
namespace {

struct PlainInt16 {
    static constexpr int N = 8;
    typedef int16_t Vec __attribute__((vector_size(16)));
    static Vec set1(int16_t v) { return Vec{v, v, v, v, v, v, v, v}; }
    static Vec load(const int16_t* p) {
        Vec r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    static void store(int16_t* p, Vec v) { std::memcpy(p, &v, sizeof v); }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec mulhrs(Vec a, Vec b) {
        Vec r;
        for (int i = 0; i < N; i++) r[i] = static_cast<int16_t>((a[i] * b[i] + (1 << 14)) >> 15);
        return r;
    }
    static Vec min(Vec a, Vec b) { return a < b ? a : b; }
    template <int D>
    static Vec expand(const int16_t* p) {
        if constexpr (D >= 3) return set1(*p);
        Vec r;
        for (int i = 0; i < N; i++) r[i] = p[i >> D];
        return r;
    }
    static int16_t reduce_min(Vec a) {
        int16_t r = a[0];
        for (int i = 1; i < N; i++) r = std::min(r, static_cast<int16_t>(a[i]));
        return r;
    }
};

struct PlainFloat {
    static constexpr int N = 4;
    typedef float Vec __attribute__((vector_size(16)));
    static Vec set1(float v) { return Vec{v, v, v, v}; }
    static Vec load(const float* p) {
        Vec r;
        std::memcpy(&r, p, sizeof r);
        return r;
    }
    static void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
    static Vec sub(Vec a, Vec b) { return a - b; }
    static Vec mul(Vec a, Vec b) { return a * b; }
    static Vec add(Vec a, Vec b) { return a + b; }
    static Vec min(Vec a, Vec b) { return b < a ? b : a; }
    template <int D>
    static Vec expand(const float* p) {
        if constexpr (D >= 2) return set1(*p);
        Vec r;
        for (int i = 0; i < N; i++) r[i] = p[i >> D];
        return r;
    }
};

}  // namespace

void encode_plain(const EncodeJob& job) { encode_with<PlainInt16, PlainFloat>(job); }

}  // namespace moefit
