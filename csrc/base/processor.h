// What the processor can do, asked at run time.
#pragma once

namespace kolovod {

// Whether there are AVX2 and the conversions of float16, and the system keeps their registers.
bool HasAvx2AndF16c();

// Whether there is AVX-512 as of Ice Lake and Zen 4, and the system keeps its registers. On processors before
// them wide vectors slow the core down.
bool HasAvx512();

// Whether there are instructions for AES and for GCM's products.
bool HasAesInstructions();

}  // namespace kolovod
