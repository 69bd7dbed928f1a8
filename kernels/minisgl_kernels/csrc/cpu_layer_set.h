// The kernels of a layer for one instruction set: see cpu_lanes.h.
#include "cpu_lanes.h"
#include "cpu_ops.h"
#include "cpu_attention.h"

namespace minisgl::cpu::MINISGL_SET {

inline constexpr LayerKernels kLayerKernels = {rms_norm, turn_head, attend_part, merge_parts,
                                               attend_block};

}  // namespace minisgl::cpu::MINISGL_SET

#undef MINISGL_SET
#undef MINISGL_WIDTH
#undef MINISGL_TARGET
#undef MINISGL_EACH
#undef MINISGL_LANE_FN
