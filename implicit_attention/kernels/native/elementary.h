// Exponential and logarithm of vectors.
#pragma once

#include "simd.h"

template <typename T>
struct Exponential;

template <>
struct Exponential<float> {
  // 1.5 * 2^23, which leaves the nearest integer in the last bits of a sum, and the place and bias of the exponent.
  static constexpr float magic = 12582912.0f;
  static constexpr int shift = 23, bias = 127;
  // ln 2 in two parts, of which the product of the first with a small integer is exact.
  static constexpr float high = 0.693359375f, low = -2.12194440e-4f;
  static constexpr int degree = 7;
};

template <>
struct Exponential<double> {
  static constexpr double magic = 6755399441055744.0;
  static constexpr int shift = 52, bias = 1023;
  static constexpr double high = 6.93145751953125e-1, low = 1.42860682030941723212e-6;
  static constexpr int degree = 13;
};

template <typename T>
struct InverseFactorials {
  T of[15];
  constexpr InverseFactorials() : of() {
    double value = 1;
    of[0] = 1;
    for (int i = 1; i < 15; ++i) of[i] = static_cast<T>(value /= i);
  }
};

// exp(x) for x <= 0, and 0 below `least`, which is above where results become subnormal; NaN of NaN.
template <typename T>
IA_INLINE Vec<T> exponential(Vec<T> x, T least) {
  using E = Exponential<T>;
  constexpr InverseFactorials<T> inverse;
  const Vec<T> shifted = fma(x, all(T(1.4426950408889634074)), all(E::magic));
  const Vec<T> n = shifted - E::magic;
  Vec<T> r = fma(n, all(-E::high), x);
  r = fma(n, all(-E::low), r);
  Vec<T> sum = all(inverse.of[E::degree]);
  for (int i = E::degree - 1; i >= 0; --i) sum = fma(sum, r, all(inverse.of[i]));
  Pattern<T> bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits << E::shift) + (typename Simd<T>::Bits(E::bias) << E::shift);
  Vec<T> power;
  std::memcpy(&power, &bits, sizeof power);
  return x < least ? all(T(0)) : sum * power;
}

// log(x) for normal x >= 1; NaN of NaN.
template <typename T>
IA_INLINE Vec<T> logarithm(Vec<T> x) {
  using E = Exponential<T>;
  using Bits = typename Simd<T>::Bits;
  Pattern<T> bits;
  std::memcpy(&bits, &x, sizeof bits);
  // x = 2^e m with m in [1/sqrt(2), sqrt(2)).
  Mask<T> exponent = __builtin_convertvector(bits >> E::shift, Mask<T>) - E::bias;
  bits = (bits & ((Bits(1) << E::shift) - 1)) | (Bits(E::bias) << E::shift);
  Vec<T> m;
  std::memcpy(&m, &bits, sizeof m);
  const Mask<T> upper = m > T(1.41421356237309504880);
  m = upper ? m * T(0.5) : m;
  exponent -= upper;
  const Vec<T> e = __builtin_convertvector(exponent, Vec<T>);
  // log m = 2 artanh((m - 1)/(m + 1)).
  const Vec<T> f = (m - T(1)) / (m + T(1)), square = f * f;
  constexpr int terms = sizeof(T) == 4 ? 6 : 12;
  Vec<T> sum = all(T(1) / T(2 * terms - 1));
  for (int i = terms - 2; i >= 0; --i) sum = fma(sum, square, all(T(1) / T(2 * i + 1)));
  const Vec<T> result = fma(e, all(E::high), fma(e, all(E::low), 2 * f * sum));
  return x == x ? result : x;
}
