// The kernels of frames.
#pragma once

#include "codec/frame_kernels.h"

namespace bagua {

const FrameKernels& cuda_frame_kernels();

}  // namespace bagua
