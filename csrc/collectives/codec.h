// Floats in fewer bytes: blocks of 256 elements, each with a scale. An element is a whole number of scales,
// the nearest one (of two, the even one).
//
//   block   scale  float32, 0 or more: the largest magnitude in the block / 127 (int8) or / 7 (int4)
//           codes  int8: one byte each, -127 to 127
//                  int4: four bits each plus 8, 1 to 15; byte j of 32 has elements j (low) and j + 32
//
// With the scale's sign bit set the block has elements that are not finite: the lowest code (-128, -8) is a
// NaN, the ones at both ends (127, 7) infinities, and the finite ones use what is left (126, 6). A block
// whose magnitudes are all below 127 / FLT_MAX, about 4e-37, is zeros.
//
// Blocks begin with each tensor, so what an element becomes depends on its tensor alone: not on what it is
// sent with, how it is cut, or how many there are. Every instruction set makes the same bits. Blockwise
// quantization of gradients by their largest magnitude: S. Rajbhandari et al., "ZeRO++", arXiv 2306.10209.
#pragma once

#include <cstddef>

#include "base/types.h"

namespace kolovod {

inline constexpr size_t kCodecBlock = 256;  // elements
inline constexpr size_t kCodecBlockBytes = kCodecBlock * sizeof(float);
// Tensors of fewer elements are sent as they are: a scale for little costs more than it saves.
inline constexpr size_t kLeastCoded = 1024;

constexpr size_t EncodedBlockBytes(Codec codec) {
  return sizeof(float) + kCodecBlock / (codec == Codec::kInt4 ? 2 : 1);
}

// What a tensor of `count` elements is sent with, if `codec` was asked for.
constexpr Codec CodecOf(Codec codec, DType dtype, size_t count) {
  const bool fits = AccumulatorOf(dtype, Op::kSum) == DType::kFloat32;
  return fits && count >= kLeastCoded ? codec : Codec::kNone;
}

}  // namespace kolovod
