// What one rank keeps of the model's weights, on its device.
//
// q, k, v, gate and up are cut by rows (heads, inner units), o and down by columns; everything else is whole on every rank.
#pragma once
#include <atomic>
#include <vector>

#include "kernels/linear.h"
#include "memory.h"

namespace ls::cuda {

struct Layer {
  Linear q, k, v, o, gate, up, down;
  const float *attn_norm = nullptr, *ffn_norm = nullptr, *q_norm = nullptr, *k_norm = nullptr;  // the last two null without qk_norm
};

class Weights {
 public:
  Weights(const ls_config &config, uint32_t rank, uint32_t ranks);

  // Keeps the view. LS_INVALID for an unknown id.
  Status set(uint32_t id, const TensorView &view);
  // What the kernels cannot take, before anything is loaded. LS_INVALID naming the first missing tensor; LS_UNSUPPORTED.
  Status check() const;
  // Packs on `threads` threads and uploads to the device in use. permille goes 0..999 by bytes.
  Status load(int device, uint32_t threads, std::atomic<int32_t> &permille);

  uint64_t bytes() const { return bytes_; }
  const Layer &layer(uint32_t index) const { return layers_[index]; }
  const float *final_norm() const { return final_norm_; }
  // Of a packed embedding that is the head, too.
  const Linear &head() const { return head_; }
  bool tied() const { return config_.tied_embeddings != 0; }
  // In the layout of its file, when it is not tied.
  const void *embedding() const { return embedding_; }
  ls_dtype embedding_dtype() const { return views_[LS_ROLE_EMBEDDING].dtype; }

 private:
  struct Matrix {
    uint32_t id;
    WeightSlice slice;
    Linear *out;
    uint32_t bias = 0;  // tensor id of its bias; 0 = none
    uint32_t bias_first = 0;
  };
  struct Vector {
    uint32_t id, first, count;
    const float **out;
  };
  const ls_config config_;
  const uint32_t rank_, ranks_;
  std::vector<TensorView> views_;  // by tensor id
  std::vector<Layer> layers_;
  Linear head_;
  const float *final_norm_ = nullptr;
  const void *embedding_ = nullptr;
  std::vector<DeviceMemory> memory_;
  uint64_t bytes_ = 0;

  std::vector<Matrix> matrices();
  std::vector<Vector> vectors();
  Status take(size_t bytes, void **out);
  Status upload_vector(uint32_t id, uint32_t first, uint32_t count, const float **out);
};

// The f32 values of elements [first, first + count) of a tensor of one row.
std::vector<float> vector_values(const TensorView &view, uint32_t first, uint32_t count);

}  // namespace ls::cuda
