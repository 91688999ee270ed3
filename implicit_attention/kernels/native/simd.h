// Vectors of the instruction set that this file is compiled for, by the vector extensions of GCC and clang.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__AVX512F__)
#include <immintrin.h>
#define IA_BYTES 64
// Rows of a product whose sums are held in registers at once.
#define IA_ROWS 8
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define IA_BYTES 32
#define IA_ROWS 6
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define IA_BYTES 16
#define IA_ROWS 8
#else
#error "compile for AVX2 with FMA, AVX-512 or NEON: narrower vectors are slower than torch"
#endif

#define IA_INLINE inline __attribute__((always_inline))

template <typename T>
struct Simd;

template <>
struct Simd<float> {
  typedef float Vec __attribute__((vector_size(IA_BYTES)));
  typedef int32_t Int __attribute__((vector_size(IA_BYTES)));
  typedef uint32_t Unsigned __attribute__((vector_size(IA_BYTES)));
  using Bits = uint32_t;
};

template <>
struct Simd<double> {
  typedef double Vec __attribute__((vector_size(IA_BYTES)));
  typedef int64_t Int __attribute__((vector_size(IA_BYTES)));
  typedef uint64_t Unsigned __attribute__((vector_size(IA_BYTES)));
  using Bits = uint64_t;
};

template <typename T>
using Vec = typename Simd<T>::Vec;
// What comparisons of vectors give: all bits of a lane, or none.
template <typename T>
using Mask = typename Simd<T>::Int;
// The bits of numbers, whose sums may overflow.
template <typename T>
using Pattern = typename Simd<T>::Unsigned;

template <typename T>
constexpr int LANES = IA_BYTES / sizeof(T);

#if IA_BYTES == 64
IA_INLINE Vec<float> all(float x) { return (Vec<float>)_mm512_set1_ps(x); }
IA_INLINE Vec<double> all(double x) { return (Vec<double>)_mm512_set1_pd(x); }
IA_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
IA_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
IA_INLINE Vec<float> root(Vec<float> a) { return (Vec<float>)_mm512_sqrt_ps((__m512)a); }
IA_INLINE Vec<double> root(Vec<double> a) { return (Vec<double>)_mm512_sqrt_pd((__m512d)a); }
#elif IA_BYTES == 32
IA_INLINE Vec<float> all(float x) { return (Vec<float>)_mm256_set1_ps(x); }
IA_INLINE Vec<double> all(double x) { return (Vec<double>)_mm256_set1_pd(x); }
IA_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
IA_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
IA_INLINE Vec<float> root(Vec<float> a) { return (Vec<float>)_mm256_sqrt_ps((__m256)a); }
IA_INLINE Vec<double> root(Vec<double> a) { return (Vec<double>)_mm256_sqrt_pd((__m256d)a); }
#else
IA_INLINE Vec<float> all(float x) { return (Vec<float>)vdupq_n_f32(x); }
IA_INLINE Vec<double> all(double x) { return (Vec<double>)vdupq_n_f64(x); }
IA_INLINE Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
  return (Vec<float>)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
IA_INLINE Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return (Vec<double>)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
IA_INLINE Vec<float> root(Vec<float> a) { return (Vec<float>)vsqrtq_f32((float32x4_t)a); }
IA_INLINE Vec<double> root(Vec<double> a) { return (Vec<double>)vsqrtq_f64((float64x2_t)a); }
#endif

// Memory of any alignment.
template <typename T>
IA_INLINE Vec<T> load(const T *from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

template <typename T>
IA_INLINE void store(T *to, Vec<T> v) {
  std::memcpy(to, &v, sizeof v);
}

// NaN where b is.
template <typename V>
IA_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}

template <typename V>
IA_INLINE V absolute(V a) {
  return a < 0 ? -a : a;
}

template <typename T>
IA_INLINE bool any(Mask<T> mask) {
  typename Simd<T>::Bits bits = 0;
  for (int i = 0; i < LANES<T>; ++i) bits |= static_cast<typename Simd<T>::Bits>(mask[i]);
  return bits != 0;
}
