// Partial results of the partitions of a row put together in their order.
//   partial (partial rows, kv heads, DP) f32, not divided by their sums; behind it (partial rows, kv heads, {largest score, sum of weights})
#include "../device.h"
#include "attention.h"

namespace ls::cuda {
namespace {

constexpr int kMostParts = 64;

template <int DP>
LS_KERNEL LS_BOUNDS(DP, 1) void attention_fold_kernel(AttentionArgs a, const AttentionFold *folds, const int32_t *count) {
  LS_SHARED(float, factor, kMostParts);  // first the largest score of a part, then what its sums are multiplied by
  LS_SHARED(float, share, kMostParts);
  const int heads = static_cast<int>(a.layout.kv_heads), head_dim = static_cast<int>(a.layout.head_dim), group = static_cast<int>(a.heads) / heads;
  const int dim = static_cast<int>(thread_x());
  const float *partial = static_cast<const float *>(a.partial), *stats = partial + static_cast<size_t>(a.partial_rows) * heads * DP;
  const int total = *count * heads;
  for (int item = static_cast<int>(block_x()); item < total; item += static_cast<int>(grid_x())) {
    const AttentionFold fold = folds[item / heads];
    const int kv_head = item % heads;
    for (int row = static_cast<int>(block_y()); row < fold.rows; row += static_cast<int>(grid_y())) {
      const auto at = [&](int part) { return static_cast<size_t>(fold.partial + part * fold.rows + row) * heads + kv_head; };
      float mine = 0;
      if (dim < fold.parts) {
        factor[dim] = mine = stats[at(dim) * 2];
        share[dim] = stats[at(dim) * 2 + 1];
      }
      sync_block();
      float top = factor[0], weight = 0, sum = 0;  // a row sees key 0, so the first part has a score
      for (int p = 1; p < fold.parts; ++p) top = fmaxf(top, factor[p]);
      sync_block();
      if (dim < fold.parts) factor[dim] = exp2_fast(mine - top);
      sync_block();
      LS_UNROLL_BY(8)
      for (int p = 0; p < fold.parts; ++p) {
        weight += factor[p] * share[p];
        sum += factor[p] * partial[at(p) * DP + dim];
      }
      const int packed = fold.first + row;
      if (dim < head_dim)
        static_cast<bf16 *>(a.out)[(static_cast<size_t>(fold.token + packed / group) * a.heads + kv_head * group + packed % group) * head_dim + dim] = __float2bfloat16(sum / weight * a.scales.v);
      sync_block();
    }
  }
}

}  // namespace

void attention_fold(Stream stream, const AttentionArgs &args, const AttentionFold *folds, const int32_t *count, uint32_t grid_folds) {
  const uint32_t heads = args.layout.kv_heads, group = args.heads / heads, dim = args.layout.head_dim;
  const Dim grid{grid_folds * heads, group < 16 ? group : 16};
  if (dim <= 64) launch(attention_fold_kernel<64>, grid, Dim{64}, 0, stream, args, folds, count);
  else if (dim <= 128) launch(attention_fold_kernel<128>, grid, Dim{128}, 0, stream, args, folds, count);
  else launch(attention_fold_kernel<256>, grid, Dim{256}, 0, stream, args, folds, count);
}

}  // namespace ls::cuda
