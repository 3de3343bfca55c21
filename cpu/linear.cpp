#include "linear.h"

#include <algorithm>
#include <cstring>

#include "buffer.h"
#include "isa.h"
#include "linear_impl.h"

namespace ls::cpu {
namespace {

const char *dtype_name(ls_dtype dtype) {
  switch (dtype) {
    case LS_DTYPE_F32: return "f32";
    case LS_DTYPE_F16: return "f16";
    case LS_DTYPE_BF16: return "bf16";
    case LS_DTYPE_Q8_0: return "Q8_0";
    case LS_DTYPE_Q4_0: return "Q4_0";
    case LS_DTYPE_Q4_1: return "Q4_1";
  }
  return "?";
}

// Bytes of a row of `cols` weights; 0 for an unknown dtype.
uint64_t row_bytes(ls_dtype dtype, uint64_t cols) {
  switch (dtype) {
    case LS_DTYPE_F32: return cols * 4;
    case LS_DTYPE_F16:
    case LS_DTYPE_BF16: return cols * 2;
    case LS_DTYPE_Q8_0: return cols / 32 * 34;
    case LS_DTYPE_Q4_0: return cols / 32 * 18;
    case LS_DTYPE_Q4_1: return cols / 32 * 20;
  }
  return 0;
}

bool quantised(ls_dtype dtype) { return dtype == LS_DTYPE_Q8_0 || dtype == LS_DTYPE_Q4_0 || dtype == LS_DTYPE_Q4_1; }

// The input of one linear_forward in every form that its matrices need. Kept by the calling thread: steps reuse it.
struct Activations {
  Buffer<int16_t> q;
  Buffer<float> d, sum;
  Buffer<int32_t> minus8, minus128;
  Buffer<uint8_t> packed;
};

struct Task {
  const LinearOut *out = nullptr;
  uint32_t rows_per_chunk = 0, first_chunk = 0;
};

// Rows of w that one chunk takes. Small enough that a helper that loses its core holds up little and the last chunks even out, large enough
// that claiming costs nothing.
uint32_t chunk_rows(const Linear &w, uint32_t m, uint32_t threads) {
  constexpr uint64_t kMinBytes = 16 * 1024, kMaxBytes = 128 * 1024, kMaxMacs = 8u << 20;
  uint32_t granule = w.path == Linear::Path::floats ? w.kernels->float_rows : w.path == Linear::Path::quants ? w.quants.group : 64;
  if (w.path == Linear::Path::tiles && w.rows() / 128 < threads) granule = 16;  // a small matrix on many cores
  if (m > 3) granule = std::max(granule, 16u);
  const ls_dtype dtype = w.path == Linear::Path::quants ? w.quants.dtype : w.floats.dtype;
  const uint64_t bytes = std::max<uint64_t>(1, row_bytes(dtype, w.cols())), macs = uint64_t{w.cols()} * m;
  uint64_t rows = w.rows() / (uint64_t{threads} * 6);
  rows = std::max(rows, kMinBytes / std::max<uint64_t>(bytes, macs / 8));
  rows = std::min(rows, std::max<uint64_t>(1, std::min(kMaxBytes / bytes, kMaxMacs / macs)));
  return static_cast<uint32_t>(std::max<uint64_t>(1, (rows + granule / 2) / granule) * granule);
}

void product(const Linear &w, uint32_t row0, uint32_t row1, const float *x, uint32_t m, uint32_t ldx, const QuantRows &quant, const uint8_t *packed, const LinearTarget &target) {
  switch (w.path) {
    case Linear::Path::floats: {
      thread_local Buffer<float> scratch;
      w.kernels->float_product(w.floats, row0, row1, x, m, ldx, target, scratch.ensure(w.kernels->float_scratch(w.floats.cols)));
      return;
    }
    case Linear::Path::tiles: w.kernels->tile_product(w.floats, w.owned.data(), row0, row1, packed, m, target); return;
    case Linear::Path::quants: w.kernels->quant_product(w.quants, row0 / w.quants.group, (row1 + w.quants.group - 1) / w.quants.group, quant, m, target); return;
  }
}

// Calls fn(i) for i in [0, count): on the pool when the work is worth waking somebody.
template <class F>
void maybe_parallel(ThreadPool &pool, bool parallel, uint32_t count, F &&fn) {
  if (parallel) pool.run(count, fn);
  else for (uint32_t i = 0; i < count; ++i) fn(i);
}

}  // namespace

void LinearDeleter::operator()(Linear *w) const { delete w; }
uint32_t linear_rows(const Linear &w) { return w.rows(); }
uint32_t linear_cols(const Linear &w) { return w.cols(); }
uint64_t linear_owned_bytes(const Linear &w) { return w.owned.size(); }

Status linear_kernels(const LinearKernels *&out) {
  Isa isa;
  if (Status s = detect_isa(isa); !s.ok()) return s;
  switch (isa) {
    case Isa::avx2: out = &linear_kernels_avx2(); break;
    case Isa::avx512: out = cpu_features().vnni ? &linear_kernels_avx512vnni() : &linear_kernels_avx512(); break;
    case Isa::amx: out = &linear_kernels_amx(); break;
  }
  return Status::good();
}

Status linear_prepare(const TensorView &view, ThreadPool &pool, LinearPtr &out) {
  const LinearKernels *kernels = nullptr;
  if (Status s = linear_kernels(kernels); !s.ok()) return s;
  return linear_prepare_with(*kernels, view, pool, out);
}

Status linear_prepare_with(const LinearKernels &kernels, const TensorView &view, ThreadPool &pool, LinearPtr &out) {
  const std::string shape = std::to_string(view.rows) + " x " + std::to_string(view.cols) + " " + dtype_name(view.dtype);
  const uint64_t bytes = row_bytes(view.dtype, view.cols) * view.rows;
  if (!view.data || !view.rows || !view.cols) return Status::fail(LS_INVALID, "matrix " + shape + ": empty");
  if (quantised(view.dtype) && view.cols % 32) return Status::fail(LS_INVALID, "matrix " + shape + ": columns must be a multiple of 32");
  if (!bytes || view.bytes != bytes) return Status::fail(LS_INVALID, "matrix " + shape + ": has " + std::to_string(view.bytes) + " bytes, expected " + std::to_string(bytes));
  LinearPtr w(new Linear);
  w->kernels = &kernels;
  w->floats = {view.data, view.dtype, view.rows, view.cols};
  if (quantised(view.dtype)) {
    w->path = Linear::Path::quants;
    if (Status s = quant_repack(view, kernels.group, pool, w->quants, w->owned); !s.ok()) return s;
  } else if (kernels.tile_product && view.dtype == LS_DTYPE_BF16 && view.cols % 32 == 0) {
    w->path = Linear::Path::tiles;
    if (const uint64_t tail = view.rows % 16) {  // tiles read 16 rows: the last ones get company in owned memory
      const uint64_t row = row_bytes(view.dtype, view.cols);
      if (Status s = w->owned.allocate(16 * row); !s.ok()) return s;
      std::memset(w->owned.data(), 0, 16 * row);
      std::memcpy(w->owned.data(), view.data + (view.rows - tail) * row, tail * row);
    }
  }
  out = std::move(w);
  return Status::good();
}

void linear_forward(ThreadPool &pool, const float *x, uint32_t m, uint32_t ldx, const LinearOut *outs, uint32_t count) {
  constexpr uint32_t kMaxTasks = 8;
  for (; count > kMaxTasks; outs += kMaxTasks, count -= kMaxTasks) linear_forward(pool, x, m, ldx, outs, kMaxTasks);
  if (m == 0 || count == 0) return;
  const LinearKernels &kernels = *outs[0].w->kernels;
  const uint32_t cols = outs[0].w->cols();
  Task tasks[kMaxTasks];
  uint32_t chunks = 0;
  uint64_t macs = 0;
  bool quants = false, tiles = false;
  for (uint32_t i = 0; i < count; ++i) {
    const Linear &w = *outs[i].w;
    tasks[i] = {&outs[i], chunk_rows(w, m, pool.size()), chunks};
    chunks += (w.rows() + tasks[i].rows_per_chunk - 1) / tasks[i].rows_per_chunk;
    macs += uint64_t{w.rows()} * cols * m;
    quants |= w.path == Linear::Path::quants;
    tiles |= w.path == Linear::Path::tiles;
  }
  const bool parallel = pool.size() > 1 && macs >= 64 * 1024;  // less is over before a helper wakes
  const bool parallel_input = parallel && m >= 8;

  thread_local Activations act;
  QuantRows quant;
  if (quants) {
    const size_t blocks = static_cast<size_t>(m) * (cols / 32);
    quant = {act.q.ensure(static_cast<size_t>(m) * cols), act.d.ensure(blocks), act.sum.ensure(blocks), act.minus8.ensure(blocks), act.minus128.ensure(blocks), cols};
    const uint32_t step = std::max(1u, 4096 / cols);  // tokens per chunk
    maybe_parallel(pool, parallel_input, (m + step - 1) / step, [&](uint32_t chunk) {
      for (uint32_t t = chunk * step; t < m && t < (chunk + 1) * step; ++t) kernels.quantize_row(x + static_cast<size_t>(t) * ldx, t, quant);
    });
  }
  uint8_t *packed = nullptr;
  if (tiles) {
    const uint32_t token_tiles = (m + 15) / 16;
    packed = act.packed.ensure(token_tiles * tile_bytes(cols));
    maybe_parallel(pool, parallel_input, token_tiles, [&](uint32_t tile) { kernels.tile_pack(x, m, ldx, cols, tile, packed); });
  }
  maybe_parallel(pool, parallel, chunks, [&](uint32_t chunk) {
    uint32_t i = count - 1;
    while (chunk < tasks[i].first_chunk) --i;
    const LinearOut &out = *tasks[i].out;
    const uint32_t row0 = (chunk - tasks[i].first_chunk) * tasks[i].rows_per_chunk, row1 = std::min(out.w->rows(), row0 + tasks[i].rows_per_chunk);
    product(*out.w, row0, row1, x, m, ldx, quant, packed, {out.y, out.ldy, out.bias, out.accumulate});
  });
}

void linear_row(const Linear &w, uint32_t row, float *y) {
  if (w.path == Linear::Path::quants) return quant_row(w.quants, row, y);
  const uint32_t cols = w.floats.cols;
  const uint8_t *p = w.floats.data + static_cast<size_t>(row) * row_bytes(w.floats.dtype, cols);
  if (w.floats.dtype == LS_DTYPE_F32) {
    std::memcpy(y, p, size_t{cols} * 4);
    return;
  }
  for (uint32_t k = 0; k < cols; ++k) {
    uint16_t h;
    std::memcpy(&h, p + size_t{k} * 2, 2);
    if (w.floats.dtype == LS_DTYPE_F16) {
      y[k] = f16_to_f32(h);
    } else {
      const uint32_t bits = static_cast<uint32_t>(h) << 16;
      std::memcpy(y + k, &bits, 4);
    }
  }
}

}  // namespace ls::cpu
