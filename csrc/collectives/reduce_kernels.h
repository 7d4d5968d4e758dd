// The kernels, included once per instruction set by reduce_{base,avx2,avx512}.cc with KV_ISA naming a
// namespace; with KV_16_BIT_FLOATS only those of float16 and bfloat16. Nothing here may have external linkage
// or pull in a library template: a function compiled for AVX2 must never be the copy that the linker keeps
// for everybody.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(KV_16_BIT_FLOATS)
#include "collectives/codec_kernels.h"
#endif
#include "collectives/reduce.h"
#include "collectives/reduce_arithmetic.h"
#include "collectives/reduce_narrow.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Of a loop whose output may be an input, element for element: its steps do not depend on each other.
#if defined(__clang__)
#define KV_IN_PLACE _Pragma("clang loop vectorize(assume_safety)")
#else
#define KV_IN_PLACE _Pragma("GCC ivdep")
#endif

namespace kolovod {
namespace {

// Bytes of each task handled in turn. Small enough that a stride fetched ahead is still in the first-level
// cache when its turn comes; 256 to 2,048 measured the same.
constexpr size_t kStride = 512;
// How far ahead a tensor is fetched from main memory while it is packed.
constexpr size_t kPackAhead = 4096;

size_t Least(size_t a, size_t b) { return a < b ? a : b; }

template <class T>
void ScaleArray(double factor, const T* src, T* dst, size_t count) {
  const auto f = static_cast<typename Arithmetic<T>::Factor>(factor);
  KV_IN_PLACE
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
    if (s == r.own_source && r.prescale != 1.0) {
      const auto f = static_cast<typename Ar::Factor>(r.prescale);
      for (size_t i = 0; i < n; ++i) acc[i] = OpType::Apply(acc[i], Ar::Load(Scaled(src[i], f)));
    } else if constexpr (kIsNarrow<T>) {
      FoldNarrow<T, OpType>(src, n, acc);
    } else {
      for (size_t i = 0; i < n; ++i) acc[i] = OpType::Apply(acc[i], Ar::Load(src[i]));
    }
  }
}

template <class T>
void LoadBlock(const Reduction& r, size_t at, size_t n, typename Arithmetic<T>::Acc* acc) {
  using Ar = Arithmetic<T>;
  const T* src = static_cast<const T*>(r.sources[0]) + at;
  if (r.own_source == 0 && r.prescale != 1.0) {
    const auto f = static_cast<typename Ar::Factor>(r.prescale);
    for (size_t i = 0; i < n; ++i) acc[i] = Ar::Load(Scaled(src[i], f));
  } else if constexpr (kIsNarrow<T>) {
    Widen(src, n, acc);
  } else {
    for (size_t i = 0; i < n; ++i) acc[i] = Ar::Load(src[i]);
  }
}

template <class T>
void FinishBlock(const Reduction& r, size_t n, const typename Arithmetic<T>::Acc* acc, T* out) {
  using Ar = Arithmetic<T>;
  using A = typename Ar::Acc;
  if constexpr (kIsNarrow<T>) {
    Narrow(acc, n, static_cast<float>(r.divisor), static_cast<float>(r.scale), out);
  } else if (r.divisor == 1 && r.scale == 1.0) {
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
      out[i] = Ar::Store(
          static_cast<A>(FromScaled<typename Ar::Value>(static_cast<double>(acc[i]) / r.divisor * r.scale)));
  }
}

// Of 16-bit floats: one pass, as long as no source is to be scaled. False: not this case.
template <class T, class OpType, bool kCopy>
bool NarrowBlock(const Reduction& r, size_t at, size_t n, T* out, T* copy) {
  if (r.own_source >= 0 && r.prescale != 1.0) return false;
  const bool halves = r.source_count == 2 && r.divisor == 2;  // by the factor
  const float divisor = halves ? 1.0f : static_cast<float>(r.divisor);
  const auto factor = static_cast<float>(halves ? r.scale * 0.5 : r.scale);
  const int count = r.source_count;
  size_t i = 0;
  if (divisor != 1.0f) {
    i = CombineNarrow<T, OpType, kCopy, 0, true>(r.sources, count, at, n, divisor, factor, out, copy);
  } else if (count == 2) {
    i = CombineNarrow<T, OpType, kCopy, 2, false>(r.sources, count, at, n, divisor, factor, out, copy);
  } else {
    i = CombineNarrow<T, OpType, kCopy, 0, false>(r.sources, count, at, n, divisor, factor, out, copy);
  }
  const auto source = [&](int s) { return ToFloat(static_cast<const T*>(r.sources[s])[at + i]); };
  for (; i < n; ++i) {
    float value = source(0);
    for (int s = 1; s < count; ++s) value = OpType::Apply(value, source(s));
    out[i] = Arithmetic<T>::Store(value / divisor * factor);
    if constexpr (kCopy) copy[i] = out[i];
  }
  return true;
}

// The common case, two sources without prescale: one pass from memory to memory, and to the second
// destination too unless that is streamed. False: not this case.
template <class T, class OpType, bool kCopy>
bool PairBlock(const Reduction& r, size_t at, size_t n, T* out, T* copy) {
  using Ar = Arithmetic<T>;
  if (r.source_count != 2 || (r.own_source >= 0 && r.prescale != 1.0)) return false;
  const T* a = static_cast<const T*>(r.sources[0]) + at;
  const T* b = static_cast<const T*>(r.sources[1]) + at;
  if (r.divisor == 1 && r.scale == 1.0) {
    KV_IN_PLACE
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
      KV_IN_PLACE
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

template <class T, class OpType, bool kCopy>
bool OnePass(const Reduction& r, size_t at, size_t n, T* out, T* copy) {
  if constexpr (kIsNarrow<T> && kHasNarrowVectors) {
    return NarrowBlock<T, OpType, kCopy>(r, at, n, out, copy);
  } else {
    return PairBlock<T, OpType, kCopy>(r, at, n, out, copy);
  }
}

// From or to partial results. False: not this case, or they are of type T.
template <class T, class OpType>
bool PartialBlock(const Reduction& r, size_t at, size_t n) {
  using Acc = typename Arithmetic<T>::Acc;
  if constexpr (sizeof(Acc) == sizeof(T)) {
    return false;
  } else {
    if (!r.from_partials && !r.to_partials) return false;
    alignas(64) Acc acc[kStride / sizeof(T)];
    if (r.from_partials) {
      memcpy(acc, static_cast<const Acc*>(r.sources[0]) + at, n * sizeof(Acc));
      for (int s = 1; s < r.source_count; ++s) {
        const Acc* src = static_cast<const Acc*>(r.sources[s]) + at;
        for (size_t i = 0; i < n; ++i) acc[i] = OpType::Apply(acc[i], src[i]);
      }
    } else {
      LoadBlock<T>(r, at, n, acc);
      Fold<T, OpType>(r, at, n, acc, 1);
    }
    if (r.to_partials) {
      memcpy(static_cast<Acc*>(r.out) + at, acc, n * sizeof(Acc));
    } else {
      FinishBlock<T>(r, n, acc, static_cast<T*>(r.out) + at);
    }
    return true;
  }
}

// Elements [at, at + n) of a reduction; n is at most kStride bytes.
template <class T, class OpType>
void ReduceBlock(const Reduction& r, size_t at, size_t n) {
  if (PartialBlock<T, OpType>(r, at, n)) return;
  T* out = static_cast<T*>(r.out) + at;
  if (r.copy_count == 1 && !r.streaming &&
      OnePass<T, OpType, true>(r, at, n, out, static_cast<T*>(r.copies[0]) + at)) {
    return;
  }
  if (!OnePass<T, OpType, false>(r, at, n, out, nullptr)) {
    alignas(64) typename Arithmetic<T>::Acc acc[kStride / sizeof(T)];
    LoadBlock<T>(r, at, n, acc);
    Fold<T, OpType>(r, at, n, acc, 1);
    FinishBlock<T>(r, n, acc, out);
  }
  for (int c = 0; c < r.copy_count; ++c) {
    T* copy = static_cast<T*>(r.copies[c]) + at;
    if (r.streaming) {
      CopyStreaming(copy, out, n * sizeof(T));
    } else {
      memcpy(copy, out, n * sizeof(T));
    }
  }
}

// Fetches `bytes` at p, as many as `left` says are there. A line that will be written, now or when its slot
// is next used, is fetched exclusively: one transfer instead of a shared copy and an upgrade.
template <bool kExclusive>
void Fetch(const void* p, size_t bytes, size_t left) {
  const char* from = static_cast<const char*>(p);
  const size_t n = bytes < left ? bytes : left;
  for (size_t i = 0; i < n; i += 64) __builtin_prefetch(from + i, kExclusive ? 1 : 0, 3);
}

void FetchStaged(const void* p, size_t bytes, size_t left, bool exclusive) {
  if (exclusive) {
    Fetch<true>(p, bytes, left);
  } else {
    Fetch<false>(p, bytes, left);
  }
}

// Lines of other ranks' staging that stride `at` of the reduction reads, and with copies also writes.
void FetchSources(const Reduction& r, size_t at, size_t total) {
  if (at >= total) return;
  const bool exclusive = r.copy_count > 0 && !r.streaming;
  for (int s = 0; s < r.source_count; ++s) {
    if (s == r.own_source) continue;
    FetchStaged(static_cast<const char*>(r.sources[s]) + at, kStride, total - at, exclusive);
  }
}

template <class T>
void PackBlock(const Exchange& x, size_t at, size_t bytes) {
  const char* from = x.pack_from + at;
  char* to = x.pack_to + at;
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i + kPackAhead, 0, 2);
  if (x.reduce.prescale != 1.0) {
    ScaleArray(x.reduce.prescale, reinterpret_cast<const T*>(from), reinterpret_cast<T*>(to),
               bytes / sizeof(T));
  } else if (x.pack_streaming) {
    CopyStreaming(to, from, bytes);
  } else {
    memcpy(to, from, bytes);
  }
}

template <class T, class OpType>
void ExchangeTyped(const Exchange& x) {
  const Reduction& r = x.reduce;
  const size_t reduce_bytes = r.count * sizeof(T);
  const size_t span = kStride * static_cast<size_t>(x.weight);
  FetchSources(r, 0, reduce_bytes);
  FetchStaged(x.out_from, span, x.out_bytes, !x.out_streaming);
  size_t wide = 0;  // position of packing and copying out, `weight` times that of reducing
  for (size_t at = 0; at < reduce_bytes || wide < x.pack_bytes || wide < x.out_bytes;
       at += kStride, wide += span) {
    FetchSources(r, at + kStride, reduce_bytes);
    if (wide + span < x.out_bytes) {
      FetchStaged(x.out_from + wide + span, span, x.out_bytes - wide - span, !x.out_streaming);
    }
    if (wide < x.pack_bytes) PackBlock<T>(x, wide, Least(span, x.pack_bytes - wide));
    if (at < reduce_bytes) {
      ReduceBlock<T, OpType>(r, at / sizeof(T), Least(kStride, reduce_bytes - at) / sizeof(T));
    }
    if (wide < x.out_bytes) memcpy(x.out_to + wide, x.out_from + wide, Least(span, x.out_bytes - wide));
  }
}

template <class T>
void ExchangeOp(const Exchange& x, T) {
  switch (x.reduce.op) {
    case Op::kAverage:
      if constexpr (!kIsFloating<typename Arithmetic<T>::Acc> && sizeof(T) < sizeof(int64_t)) {
        return ExchangeTyped<Averaged<T>, AddOp>(x);
      }
      return ExchangeTyped<T, AddOp>(x);
    case Op::kMin:
      return ExchangeTyped<T, MinOp>(x);
    case Op::kMax:
      return ExchangeTyped<T, MaxOp>(x);
    case Op::kProduct:
      return ExchangeTyped<T, MulOp>(x);
    default:
      return ExchangeTyped<T, AddOp>(x);
  }
}

#if defined(KV_16_BIT_FLOATS)

}  // namespace

namespace KV_ISA {
void Exchange16BitFloats(const Exchange& x);
void Exchange16BitFloats(const Exchange& x) {
  x.reduce.dtype == DType::kFloat16 ? ExchangeOp(x, Half()) : ExchangeOp(x, BFloat16());
}
}  // namespace KV_ISA

#else

void ExchangeOp(const Exchange& x, BoolByte) {
  const bool is_and = x.reduce.op == Op::kMin || x.reduce.op == Op::kProduct;
  return is_and ? ExchangeTyped<BoolByte, AndOp>(x) : ExchangeTyped<BoolByte, OrOp>(x);
}

void ExchangeAny(const Exchange& x) {
  VisitElement(x.reduce.dtype, [&](auto element) { ExchangeOp(x, element); });
}

}  // namespace

namespace KV_ISA {
extern const Kernels kKernels;
const Kernels kKernels = {ExchangeAny,         CopyStreaming,      StreamingFence, EncodeBlocks,
                          DecodeBlocks<false>, DecodeBlocks<true>, KV_ISA_NAME};
}  // namespace KV_ISA

#endif

}  // namespace kolovod
