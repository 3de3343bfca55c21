// The choice of kernels for a product, and the rows of packed matrices (embeddings that are also the head).
#include "linear_launch.h"

namespace ls::cuda {
namespace {

constexpr uint32_t kLargeRows = 64;        // of x, of outputs: what the largest blocks are for
constexpr uint32_t kLargeBlocks = 96;      // fewer of 128 x 128 leave most of a device idle

LinearSize size_for(uint32_t rows, uint32_t outputs) {
  if (rows <= 8) return LinearSize::rows8;
  if (rows <= 16) return LinearSize::rows16;
  if (rows <= kLargeRows || ((rows + 127) / 128) * ((outputs + 127) / 128) < kLargeBlocks) return LinearSize::rows64;
  return LinearSize::large;
}

using Launcher = void (*)(Stream, LinearSize, LinearParams &);
Launcher launcher_for(ls_dtype dtype) {
  switch (dtype) {
    case LS_DTYPE_F32: return linear_launch_f32;
    case LS_DTYPE_F16: return linear_launch_f16;
    case LS_DTYPE_BF16: return linear_launch_bf16;
    case LS_DTYPE_Q8_0: return linear_launch_q8_0;
    case LS_DTYPE_Q4_0: return linear_launch_q4_0;
    case LS_DTYPE_Q4_1: return linear_launch_q4_1;
  }
  return nullptr;
}

LS_DEVICE float packed_weight(const unsigned char *tile, ls_dtype dtype, uint32_t row, uint32_t col) {
  const unsigned char *unit = tile + static_cast<size_t>(col / kUnitCols) * unit_bytes(dtype);
  const UnitPlace place = unit_place(row, col % kUnitCols);
  if (dtype == LS_DTYPE_F32) return *reinterpret_cast<const float *>(unit + place32(place));
  if (dtype == LS_DTYPE_BF16) return __bfloat162float(*reinterpret_cast<const bf16 *>(unit + place16(place)));
  if (dtype == LS_DTYPE_F16) return __half2float(*reinterpret_cast<const __half *>(unit + place16(place)));
  const float d = __half2float(*reinterpret_cast<const __half *>(unit + place_scale(dtype, row)));
  if (dtype == LS_DTYPE_Q8_0) return d * static_cast<float>(static_cast<signed char>(unit[place8(place)]));
  const int q = static_cast<int>(*reinterpret_cast<const uint32_t *>(unit + place4_word(place)) >> place4_bit(place) & 15u);
  if (dtype == LS_DTYPE_Q4_0) return d * static_cast<float>(q - 8);
  return fma_rn(d, static_cast<float>(q), __half2float(*reinterpret_cast<const __half *>(unit + place_scale(dtype, row) + 32)));  // d q is exact: rounded once
}

LS_KERNEL LS_BOUNDS(256, 1) void linear_gather_kernel(const unsigned char *w, ls_dtype dtype, uint32_t rows, uint32_t cols, const int32_t *ids, const int32_t *carry, float *y) {
  int32_t id = ids[block_x()];
  if (id < 0) id = carry ? carry[~id] : 0;
  const uint32_t row = id < 0 || static_cast<uint32_t>(id) >= rows ? 0 : static_cast<uint32_t>(id);
  const size_t tile_bytes = static_cast<size_t>((cols + kUnitCols - 1) / kUnitCols) * unit_bytes(dtype);
  const unsigned char *tile = w + row / kTileRows * tile_bytes;
  for (uint32_t col = thread_x(); col < cols; col += 256) y[static_cast<size_t>(block_x()) * cols + col] = packed_weight(tile, dtype, row % kTileRows, col);
}

}  // namespace

void linear_forward(Stream stream, const void *x, uint32_t rows, uint32_t ldx, const LinearOut *outs, uint32_t count) {
  if (rows == 0) return;
  // Runs of outputs with weights of one type.
  for (uint32_t begin = 0, end; begin < count; begin = end) {
    LinearParams params;
    params.x = static_cast<const bf16 *>(x);
    params.rows = rows, params.cols = outs[begin].w->cols, params.ldx = ldx;
    uint32_t outputs = 0;
    for (end = begin; end < count && end - begin < kMaxLinearOuts && outs[end].w->dtype == outs[begin].w->dtype; ++end) {
      const LinearOut &out = outs[end];
      LinearJob &job = params.jobs[end - begin];
      job.w = static_cast<const unsigned char *>(out.w->data);
      job.bias = out.w->bias;
      job.y = out.y;
      job.outputs = out.w->rows, job.ldy = out.ldy;
      job.type = out.type, job.accumulate = out.accumulate;
      const uint32_t bytes = 4 * element_bytes(out.type);
      job.aligned = reinterpret_cast<uintptr_t>(out.y) % bytes == 0 && out.ldy % 4 == 0;
      outputs += out.w->rows;
    }
    launcher_for(outs[begin].w->dtype)(stream, size_for(rows, outputs), params);
  }
}

void linear_gather(Stream stream, const Linear &w, const int32_t *ids, const int32_t *carry, uint32_t count, float *y) {
  launch(linear_gather_kernel, Dim{count}, Dim{256}, 0, stream, static_cast<const unsigned char *>(w.data), w.dtype, w.rows, w.cols, ids, carry, y);
}

}  // namespace ls::cuda
