// Inside of Linear, for linear*.cpp and tests: the variant of the kernels is a parameter here.
#pragma once
#include <memory>

#include "linear.h"
#include "linear_kernels.h"

namespace ls::cpu {

// Memory of a repacked matrix: 64-byte aligned, uninitialised. Matrices share blocks in huge pages, since a small one of its own would sit in
// 4 KiB pages and stream up to a fifth slower. A block is freed with the last matrix in it.
class WeightMemory {
 public:
  Status allocate(size_t bytes);
  uint8_t *data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::shared_ptr<uint8_t> block_;
  uint8_t *data_ = nullptr;
  size_t size_ = 0;
};

struct Linear {
  enum class Path { floats, tiles, quants };
  const LinearKernels *kernels = nullptr;
  Path path = Path::floats;
  FloatMatrix floats;    // floats, tiles
  QuantMatrix quants;    // quants: data points into owned
  WeightMemory owned;    // quants: everything; tiles: the padded last 16 rows
  uint32_t rows() const { return path == Path::quants ? quants.rows : floats.rows; }
  uint32_t cols() const { return path == Path::quants ? quants.cols : floats.cols; }
};

// The kernels of the ISA that detect_isa picks (VNNI when the machine has it).
Status linear_kernels(const LinearKernels *&out);

Status linear_prepare_with(const LinearKernels &kernels, const TensorView &view, ThreadPool &pool, LinearPtr &out);

// linear_repack.cpp: interleaves `group` rows of view as QuantMatrix describes, split over the pool.
Status quant_repack(const TensorView &view, uint32_t group, ThreadPool &pool, QuantMatrix &matrix, WeightMemory &memory);
// Row of a repacked matrix as f32: w = d*q, d*(q-8), d*q + m.
void quant_row(const QuantMatrix &matrix, uint32_t row, float *y);

float f16_to_f32(uint16_t h);

}  // namespace ls::cpu
