// The shapes of blocks that exist, and the choice among them.
#pragma once
#include "linear_kernel.cuh"

namespace ls::cuda {

template <class Weights, int MT, int NT, int WM, int WN, int KB, int STAGES>
void launch_linear(Stream stream, LinearParams &params) {
  using S = LinearShape<Weights, MT, NT, WM, WN, KB, STAGES>;
  params.row_blocks = (params.rows + S::kRows - 1) / S::kRows;
  params.output_blocks = 0;
  for (LinearJob &job : params.jobs) {
    if (!job.w) continue;
    job.first_block = params.output_blocks;
    params.output_blocks += (job.outputs + S::kOutputs - 1) / S::kOutputs;
  }
  launch(linear_kernel<Weights, MT, NT, WM, WN, KB, STAGES>, Dim{params.output_blocks * params.row_blocks}, Dim{static_cast<unsigned>(S::kThreads)}, S::kShared, stream, params);
}

// Few rows: bound by the reading of weights. A block is one tile of 16 outputs, so that even small matrices occupy the whole device; the
// bytes under way (stages - 1 of 2 * KB units) times the blocks of a multiprocessor cover the latency of its memory.
// Up to 64 rows: two tiles a block, against the reads of x. Many rows: bound by arithmetic, 64 x 64 sums a warp; quantised weights need registers
// for the sum of a block besides, and are unpacked once a block of threads: 32 x 64.
template <class Weights>
void launch_linear(Stream stream, LinearSize size, LinearParams &params) {
  constexpr bool kSplit = Weights::kType == LS_DTYPE_F16 || Weights::kType == LS_DTYPE_F32, kQuant = Weights::kType >= LS_DTYPE_Q8_0;
  constexpr int kUnits = Weights::kType == LS_DTYPE_F32 ? 2 : 4, kStages = unit_bytes(Weights::kType) >= 1024 ? 4 : 6;
  if (size == LinearSize::rows8) launch_linear<Weights, 1, 1, 1, 1, kUnits, kStages>(stream, params);
  else if (size == LinearSize::rows16) launch_linear<Weights, 1, 2, 1, 1, kUnits, kStages>(stream, params);
  else if (size == LinearSize::rows64 || kSplit) launch_linear<Weights, 1, 8, 2, 1, 1, 5>(stream, params);
  else if constexpr (kQuant) launch_linear<Weights, 2, 8, 4, 1, 1, 4>(stream, params);
  else if constexpr (!kSplit) launch_linear<Weights, 4, 8, 2, 2, 1, 3>(stream, params);
}

}  // namespace ls::cuda
