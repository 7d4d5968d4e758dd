// Floats in fewer bytes: blocks of 256 elements, encoded in groups that each have a scale. An element is a
// whole number of scales, the nearest one (of two, the even one).
//
//   int8  one group a block: its scale, a float32, which is the largest magnitude / 127; then a code for each
//         element, -127 to 127, in a byte
//   int4  four groups of 64: the largest magnitude of each as bfloat16, rounded to zero, whose seventh is the
//         scale (so ones stay ones); then codes of -7 to 7 plus 8, in four bits each; byte j of a group's 32
//         has its elements j (low) and j + 32
//
// With the sign bit of that set the group has elements that are not finite: the lowest code (-128, -8) is a
// NaN, the ones at both ends (127, 7) infinities, and the finite ones use what is left (126, 6). A group
// whose magnitudes are all below 127 / FLT_MAX, about 4e-37, is zeros.
//
// Four bits want small groups: what the largest of 256 gradients sets as the step, most of the others are
// less than. 64 with half a scale take the room of 128 with a whole one, and their error is 27 % (normal) to
// 57 % (Student's t, 3 degrees of freedom) less, as variance, than that of 256.
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
  return codec == Codec::kInt4 ? kCodecBlock / 64 * 2 + kCodecBlock / 2 : sizeof(float) + kCodecBlock;
}

// What a tensor of `count` elements is sent with, if `codec` was asked for.
constexpr Codec CodecOf(Codec codec, DType dtype, size_t count) {
  const bool fits = AccumulatorOf(dtype, Op::kSum) == DType::kFloat32;
  return fits && count >= kLeastCoded ? codec : Codec::kNone;
}

}  // namespace kolovod
