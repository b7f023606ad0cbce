// The kernels of frames.
#pragma once

#include "codec/frame_kernels.h"

namespace bagua {

const FrameKernels& cuda_frame_kernels();

// For a factory of something that has them: see Note [Kernels are loaded where they are made].
// While a LoadsKernels lives.
void load_kernels(const FrameKernels& kernels);

}  // namespace bagua
