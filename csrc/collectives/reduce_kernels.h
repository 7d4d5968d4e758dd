// The kernels, included once per instruction set by reduce_{base,avx2}.cc with KV_ISA naming a
// namespace. Nothing here may have external linkage or pull in a library template: a function compiled
// for AVX2 must never be the copy that the linker keeps for everybody.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/half.h"
#include "collectives/reduce.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kolovod {
namespace {

constexpr size_t kBlock = 1024;  // elements accumulated at a time: stays in the first-level cache

struct BoolByte {
  uint8_t value;
};

// How a stored type is loaded for arithmetic and stored back.
template <class T>
struct Arithmetic {
  using Acc = T;
  using Factor = double;
  static Acc Load(T v) { return v; }
  static T Store(Acc v) { return v; }
};
template <>
struct Arithmetic<float> {
  using Acc = float;
  using Factor = float;
  static float Load(float v) { return v; }
  static float Store(float v) { return v; }
};
template <>
struct Arithmetic<Half> {
  using Acc = float;
  using Factor = float;
  static float Load(Half v) { return ToFloat(v); }
  static Half Store(float v) { return ToHalf(v); }
};
template <>
struct Arithmetic<BFloat16> {
  using Acc = float;
  using Factor = float;
  static float Load(BFloat16 v) { return ToFloat(v); }
  static BFloat16 Store(float v) { return ToBFloat16(v); }
};
template <>
struct Arithmetic<BoolByte> {
  using Acc = uint8_t;
  using Factor = double;
  static uint8_t Load(BoolByte v) { return v.value != 0; }
  static BoolByte Store(uint8_t v) { return BoolByte{static_cast<uint8_t>(v != 0)}; }
};

template <class T>
constexpr bool kIsFloating = false;
template <>
constexpr bool kIsFloating<float> = true;
template <>
constexpr bool kIsFloating<double> = true;

// Signed sums wrap, as in every peer: computed unsigned, where wrapping is defined.
template <class A>
struct Wrapping {
  using Type = A;
};
template <>
struct Wrapping<int8_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int16_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<uint8_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<uint16_t> {
  using Type = uint32_t;  // uint16 * uint16 would overflow int
};
template <>
struct Wrapping<int32_t> {
  using Type = uint32_t;
};
template <>
struct Wrapping<int64_t> {
  using Type = uint64_t;
};

struct AddOp {
  template <class A>
  static A Apply(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) + static_cast<W>(b));
  }
};
struct MulOp {
  template <class A>
  static A Apply(A a, A b) {
    using W = typename Wrapping<A>::Type;
    return static_cast<A>(static_cast<W>(a) * static_cast<W>(b));
  }
};
// A NaN on any rank is the result on every rank.
struct MinOp {
  template <class A>
  static A Apply(A a, A b) {
    return (a < b || a != a) ? a : b;
  }
};
struct MaxOp {
  template <class A>
  static A Apply(A a, A b) {
    return (a > b || a != a) ? a : b;
  }
};
struct OrOp {
  template <class A>
  static A Apply(A a, A b) {
    return static_cast<A>(a | b);
  }
};
struct AndOp {
  template <class A>
  static A Apply(A a, A b) {
    return static_cast<A>(a & b);
  }
};

// float -> integer casts outside the range are undefined in C++: clamp first, NaN becomes 0.
template <class T>
T FromScaled(double v) {
  constexpr double kLow = static_cast<double>(
      static_cast<T>(static_cast<T>(-1) < static_cast<T>(0) ? (1ULL << (sizeof(T) * 8 - 1)) : 0));
  constexpr double kHigh =
      static_cast<T>(-1) < static_cast<T>(0) ? -kLow : 2.0 * (1ULL << (sizeof(T) * 8 - 1));
  if (v != v) return 0;
  if (v <= kLow) return static_cast<T>(kLow);
  if (v >= kHigh) return static_cast<T>(~static_cast<T>(0) ^ static_cast<T>(kLow));
  return static_cast<T>(v);
}

template <class T>
T Scaled(T value, typename Arithmetic<T>::Factor factor) {
  using Ar = Arithmetic<T>;
  using A = typename Ar::Acc;
  if constexpr (kIsFloating<A>) {
    return Ar::Store(static_cast<A>(Ar::Load(value) * factor));
  } else {
    return Ar::Store(FromScaled<A>(static_cast<double>(Ar::Load(value)) * factor));
  }
}

template <class T>
void ScaleArray(double factor, const T* src, T* dst, size_t count) {
  const auto f = static_cast<typename Arithmetic<T>::Factor>(factor);
#pragma GCC ivdep  // dst may be src, element for element
  for (size_t i = 0; i < count; ++i) dst[i] = Scaled(src[i], f);
}

#if defined(__AVX2__)
void CopyStreaming(void* dst, const void* src, size_t bytes) {
  char* to = static_cast<char*>(dst);
  const char* from = static_cast<const char*>(src);
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(to) & 63)) & 63;
  if (bytes < head + 64) {
    memcpy(to, from, bytes);
    return;
  }
  memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  const size_t lines = bytes / 64;
  for (size_t i = 0; i < lines; ++i, to += 64, from += 64) {
    const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to), a);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), b);
  }
  memcpy(to, from, bytes - lines * 64);
}
#else
void CopyStreaming(void* dst, const void* src, size_t bytes) { memcpy(dst, src, bytes); }
#endif

template <class T, class OpType>
void Fold(const Reduction& r, size_t at, size_t n, typename Arithmetic<T>::Acc* acc, int first) {
  using Ar = Arithmetic<T>;
  for (int s = first; s < r.source_count; ++s) {
    const T* src = static_cast<const T*>(r.sources[s]) + at;
    if (s == r.scaled_source && r.prescale != 1.0) {
      const auto f = static_cast<typename Ar::Factor>(r.prescale);
      for (size_t i = 0; i < n; ++i) acc[i] = OpType::Apply(acc[i], Ar::Load(Scaled(src[i], f)));
    } else {
      for (size_t i = 0; i < n; ++i) acc[i] = OpType::Apply(acc[i], Ar::Load(src[i]));
    }
  }
}

template <class T>
void LoadBlock(const Reduction& r, size_t at, size_t n, typename Arithmetic<T>::Acc* acc) {
  using Ar = Arithmetic<T>;
  const T* src = static_cast<const T*>(r.sources[0]) + at;
  if (r.scaled_source == 0 && r.prescale != 1.0) {
    const auto f = static_cast<typename Ar::Factor>(r.prescale);
    for (size_t i = 0; i < n; ++i) acc[i] = Ar::Load(Scaled(src[i], f));
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] = Ar::Load(src[i]);
  }
}

template <class T>
void FinishBlock(const Reduction& r, size_t n, const typename Arithmetic<T>::Acc* acc, T* out) {
  using Ar = Arithmetic<T>;
  using A = typename Ar::Acc;
  if (r.divisor == 1 && r.scale == 1.0) {
    for (size_t i = 0; i < n; ++i) out[i] = Ar::Store(acc[i]);
  } else if constexpr (kIsFloating<A>) {
    const auto divisor = static_cast<A>(r.divisor);
    const auto factor = static_cast<A>(r.scale);
    const bool power_of_two = (r.divisor & (r.divisor - 1)) == 0;
    if (power_of_two) {
      const A combined = static_cast<A>(factor / divisor);  // exact: only the exponent changes
      for (size_t i = 0; i < n; ++i) out[i] = Ar::Store(acc[i] * combined);
    } else {
      for (size_t i = 0; i < n; ++i) out[i] = Ar::Store(acc[i] / divisor * factor);
    }
  } else if (r.scale == 1.0) {
    const auto divisor = static_cast<int64_t>(r.divisor);
    for (size_t i = 0; i < n; ++i) out[i] = Ar::Store(static_cast<A>(static_cast<int64_t>(acc[i]) / divisor));
  } else {
    for (size_t i = 0; i < n; ++i)
      out[i] = Ar::Store(FromScaled<A>(static_cast<double>(acc[i]) / r.divisor * r.scale));
  }
}

// The common case, two sources without prescale: one pass from memory to memory, and to the second
// destination too unless that is streamed. False: not this case.
template <class T, class OpType, bool kCopy>
bool PairBlock(const Reduction& r, size_t at, size_t n, T* out, T* copy) {
  using Ar = Arithmetic<T>;
  if (r.source_count != 2 || (r.scaled_source >= 0 && r.prescale != 1.0)) return false;
  const T* a = static_cast<const T*>(r.sources[0]) + at;
  const T* b = static_cast<const T*>(r.sources[1]) + at;
  if (r.divisor == 1 && r.scale == 1.0) {
#pragma GCC ivdep  // out may be a or b, element for element
    for (size_t i = 0; i < n; ++i) {
      const T value = Ar::Store(OpType::Apply(Ar::Load(a[i]), Ar::Load(b[i])));
      out[i] = value;
      if constexpr (kCopy) copy[i] = value;
    }
    return true;
  }
  if constexpr (kIsFloating<typename Ar::Acc>) {
    if (r.divisor == 2) {
      const auto factor = static_cast<typename Ar::Acc>(r.scale * 0.5);
#pragma GCC ivdep
      for (size_t i = 0; i < n; ++i) {
        const T value = Ar::Store(OpType::Apply(Ar::Load(a[i]), Ar::Load(b[i])) * factor);
        out[i] = value;
        if constexpr (kCopy) copy[i] = value;
      }
      return true;
    }
  }
  return false;
}

template <class T, class OpType>
void ReduceTyped(const Reduction& r) {
  alignas(64) typename Arithmetic<T>::Acc acc[kBlock];
  for (size_t at = 0; at < r.count; at += kBlock) {
    const size_t n = r.count - at < kBlock ? r.count - at : kBlock;
    T* out = static_cast<T*>(r.out) + at;
    T* copy = r.copy == nullptr ? nullptr : static_cast<T*>(r.copy) + at;
    if (copy != nullptr && !r.streaming && PairBlock<T, OpType, true>(r, at, n, out, copy)) continue;
    if (!PairBlock<T, OpType, false>(r, at, n, out, copy)) {
      LoadBlock<T>(r, at, n, acc);
      Fold<T, OpType>(r, at, n, acc, 1);
      FinishBlock<T>(r, n, acc, out);
    }
    if (copy == nullptr) continue;
    if (r.streaming) {
      CopyStreaming(copy, out, n * sizeof(T));
    } else {
      memcpy(copy, out, n * sizeof(T));
    }
  }
}

template <class T>
void ReduceOp(const Reduction& r) {
  switch (r.op) {
    case Op::kMin:
      return ReduceTyped<T, MinOp>(r);
    case Op::kMax:
      return ReduceTyped<T, MaxOp>(r);
    case Op::kProduct:
      return ReduceTyped<T, MulOp>(r);
    default:
      return ReduceTyped<T, AddOp>(r);
  }
}

void ReduceBool(const Reduction& r) {
  if (r.op == Op::kMin || r.op == Op::kProduct) return ReduceTyped<BoolByte, AndOp>(r);
  return ReduceTyped<BoolByte, OrOp>(r);
}

#define KV_FOR_EACH_NUMBER(X) \
  X(kUInt8, uint8_t)          \
  X(kInt8, int8_t)            \
  X(kUInt16, uint16_t)        \
  X(kInt16, int16_t)          \
  X(kInt32, int32_t)          \
  X(kInt64, int64_t)          \
  X(kFloat16, Half)           \
  X(kFloat32, float)          \
  X(kFloat64, double)         \
  X(kBFloat16, BFloat16)

void ReduceAny(const Reduction& r) {
  switch (r.dtype) {
#define KV_CASE(name, type) \
  case DType::name:         \
    return ReduceOp<type>(r);
    KV_FOR_EACH_NUMBER(KV_CASE)
#undef KV_CASE
    case DType::kBool:
      return ReduceBool(r);
  }
}

void ScaleAny(DType dtype, double factor, const void* src, void* dst, size_t count) {
  switch (dtype) {
#define KV_CASE(name, type) \
  case DType::name:         \
    return ScaleArray(factor, static_cast<const type*>(src), static_cast<type*>(dst), count);
    KV_FOR_EACH_NUMBER(KV_CASE)
#undef KV_CASE
    case DType::kBool:
      return ScaleArray(factor, static_cast<const BoolByte*>(src), static_cast<BoolByte*>(dst), count);
  }
}

}  // namespace

namespace KV_ISA {
extern const Kernels kKernels;
const Kernels kKernels = {ReduceAny, ScaleAny, CopyStreaming, KV_ISA_NAME};
}  // namespace KV_ISA
}  // namespace kolovod
