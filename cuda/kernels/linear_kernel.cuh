// The matrix product. A block makes BM outputs for BN rows of x; half of its warps walk the first half of K, the rest the second half.
//
//   W tiles   packed (linear_layout.h), copied as they are to shared memory, unpacked to A operands in registers
//   x rows    (BN, 32 * KB) a half and stage in shared memory, 16-byte chunks swizzled, read as B operands with ldmatrix
//   sums      f32 in registers, (16 outputs x 8 rows) an operand pair; the halves meet in shared memory
//
// One stage is KB units of both halves; STAGES - 1 of them are under way (cp.async) while one is computed.
#pragma once
#include "../device.h"
#include "linear_launch.h"
#include "linear_unpack.cuh"

namespace ls::cuda {

// MT x NT operand tiles (16 outputs x 8 rows) a warp, WM x WN warps for each half of K.
template <class Weights, int MT, int NT, int WM, int WN, int KB, int STAGES>
struct LinearShape {
  static constexpr int kThreads = 64 * WM * WN;
  static constexpr int kTiles = MT * WM, kRows = 8 * NT * WN;  // 16-output tiles and rows of x of a block
  static constexpr int kOutputs = 16 * kTiles;
  static constexpr int kUnit = static_cast<int>(unit_bytes(Weights::kType));
  static constexpr int kTileBytes = KB * kUnit, kRowBytes = KB * 64;
  static constexpr int kHalfBytes = kTiles * kTileBytes + kRows * kRowBytes;  // of a stage
  static constexpr int kStageBytes = 2 * kHalfBytes;
  static constexpr int kSumsPitch = kOutputs + 4;
  static constexpr int kSumsBytes = kRows * kSumsPitch * 4;
  static constexpr size_t kShared = STAGES * kStageBytes > kSumsBytes ? STAGES * kStageBytes : kSumsBytes;
  static_assert(kShared <= kMaxSharedBytes);
};

// Where 16-byte chunk `chunk` of row `row` lies: eight rows of one chunk never share a bank.
template <int KB>
LS_DEVICE int swizzled(int row, int chunk) {
  return KB == 1 ? row * 64 + (chunk ^ (row >> 1 & 3)) * 16 : row * KB * 64 + (chunk ^ (row & 7)) * 16;
}

template <class Weights, int MT, int NT, int WM, int WN, int KB, int STAGES>
LS_KERNEL LS_BOUNDS(64 * WM * WN, 1) void linear_kernel(const LinearParams p) {
  using S = LinearShape<Weights, MT, NT, WM, WN, KB, STAGES>;
  unsigned char *shared = dyn_smem<unsigned char>();
  const int thread = static_cast<int>(thread_x()), lane = thread % 32, warp = thread / 32;
  const int half = warp / (WM * WN), wm = warp % (WM * WN) / WN, wn = warp % WN;

  // Blocks that run together share weights and rows in the L2 cache: groups of up to 8 row blocks, all output blocks of a group in turn.
  const uint32_t group_blocks = 8 * p.output_blocks, group = block_x() / group_blocks, within = block_x() % group_blocks;
  const uint32_t group_rows = p.row_blocks - group * 8 < 8 ? p.row_blocks - group * 8 : 8;
  const uint32_t output_block = within / group_rows;
  const int row0 = static_cast<int>((group * 8 + within % group_rows) * S::kRows);
  LinearJob job = p.jobs[0];
  LS_UNROLL
  for (int i = 1; i < static_cast<int>(kMaxLinearOuts); ++i)
    if (output_block >= p.jobs[i].first_block) job = p.jobs[i];
  const int tile0 = static_cast<int>((output_block - job.first_block) * S::kTiles), tiles = static_cast<int>((job.outputs + 15) / 16);

  const int units = static_cast<int>((p.cols + 31) / 32), first_half = (units + 1) / 2;
  const int stages = (first_half + KB - 1) / KB;
  const size_t tile_stride = static_cast<size_t>(units) * S::kUnit;

  // Starts the copies of one stage. Tiles and rows beyond the end are left alone: what they give is never stored.
  const auto fetch = [&](int stage) {
    unsigned char *to = shared + stage % STAGES * S::kStageBytes;
    LS_UNROLL
    for (int h = 0; h < 2; ++h, to += S::kHalfBytes) {
      const int begin = h * first_half + stage * KB, end = h ? units : first_half;
      const int bytes = (end - begin < KB ? end - begin : KB) * S::kUnit;
      constexpr int kChunks = S::kTileBytes / 16;
      LS_UNROLL
      for (int base = 0; base < S::kTiles * kChunks; base += S::kThreads) {
        const int i = base + thread, tile = i / kChunks, chunk = i % kChunks;
        if ((S::kTiles * kChunks % S::kThreads == 0 || i < S::kTiles * kChunks) && chunk * 16 < bytes && tile0 + tile < tiles)
          cp_async16(to + tile * S::kTileBytes + chunk * 16, job.w + (tile0 + tile) * tile_stride + static_cast<size_t>(begin) * S::kUnit + chunk * 16);
      }
      unsigned char *rows = to + S::kTiles * S::kTileBytes;
      constexpr int kRowChunks = KB * 4;
      LS_UNROLL
      for (int base = 0; base < S::kRows * kRowChunks; base += S::kThreads) {
        const int i = base + thread, row = i / kRowChunks, chunk = i % kRowChunks;
        const int col = begin * 32 + chunk * 8, left = static_cast<int>(p.cols) - col;  // cols % 8 == 0: a chunk is whole or beyond the end
        if ((S::kRows * kRowChunks % S::kThreads == 0 || i < S::kRows * kRowChunks) && row0 + row < static_cast<int>(p.rows) && begin + chunk / 4 < end)
          cp_async16(rows + swizzled<KB>(row, chunk), left > 0 ? p.x + static_cast<size_t>(row0 + row) * p.ldx + col : p.x, left > 0 ? 16 : 0);
      }
    }
  };

  float sums[MT][NT][4] = {};
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < stages) fetch(stage);
    cp_async_commit();
  }
  const int own_units = half ? units - first_half : first_half;
  for (int stage = 0; stage < stages; ++stage) {
    cp_async_wait<STAGES - 2>();
    sync_block();  // everybody's copies of this stage are there, and nobody reads the one that is overwritten next
    if (stage + STAGES - 1 < stages) fetch(stage + STAGES - 1);
    cp_async_commit();
    const unsigned char *w = shared + stage % STAGES * S::kStageBytes + half * S::kHalfBytes, *x = w + S::kTiles * S::kTileBytes;
    LS_UNROLL
    for (int u = 0; u < KB; ++u) {
      if (stage * KB + u >= own_units) break;
      uint32_t b[NT][4];
      LS_UNROLL
      for (int n = 0; n < NT; ++n) ldmatrix_x4(b[n], x + swizzled<KB>((wn * NT + n) * 8 + lane % 8, u * 4 + lane / 8));
      Weights::template multiply<MT, NT, S::kTileBytes>(sums, w + wm * MT * S::kTileBytes + u * S::kUnit, b, lane);
    }
  }

  // Second half + first half, through shared memory as (row, output), so that rows are written in one piece.
  cp_async_wait<0>();
  sync_block();
  float *total = dyn_smem<float>();
  for (int turn = 0; turn < 2; ++turn) {
    if (half != turn) {
      LS_UNROLL
      for (int m = 0; m < MT; ++m)
        LS_UNROLL
        for (int n = 0; n < NT; ++n)
          LS_UNROLL
          for (int i = 0; i < 4; ++i) {
            const int output = (wm * MT + m) * 16 + lane / 4 + i / 2 * 8, row = (wn * NT + n) * 8 + lane % 4 * 2 + i % 2;
            float *at = total + row * S::kSumsPitch + output;
            *at = turn ? sums[m][n][i] + *at : sums[m][n][i];
          }
    }
    sync_block();
  }
  for (int i = thread; i < S::kRows * S::kOutputs / 4; i += S::kThreads) {
    const int row = i / (S::kOutputs / 4), output = i % (S::kOutputs / 4) * 4;
    if (row0 + row < static_cast<int>(p.rows)) store_outputs(job, static_cast<uint32_t>(row0 + row), static_cast<uint32_t>(tile0 * 16 + output), total + row * S::kSumsPitch + output);
  }
}

}  // namespace ls::cuda
