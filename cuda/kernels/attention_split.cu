// Split tiles: few queries against one partition of the keys. A warp takes every kWarps-th page of the partition, staged by itself, with a running
// softmax of its own; the warps' results are put together in their order at the end.
//   q (16 rows, head_dim) in registers    K, V (16 keys, head_dim) twice per warp in shared memory    sums (16, head_dim) f32 in registers
#include "attention_fragments.cuh"

namespace ls::cuda {
namespace {

template <int DP>
constexpr int kSplitWarps = DP <= 128 ? 4 : 2;
constexpr int kTileRows = 16;

template <bool kFp8, int DP>
constexpr int kPageBytes = 2 * static_cast<int>(kPageTokens) * KvTile<kFp8, DP>::kRow;
template <bool kFp8, int DP>
constexpr size_t kSplitShared = size_t{2} * kSplitWarps<DP> * kPageBytes<kFp8, DP> + kSplitWarps<DP> * kTileRows * 2 * sizeof(float);

template <bool kFp8, int DP>
LS_DEVICE void stage_page(const AttentionArgs &a, uint8_t *to, int page, int kv_head, int keys) {
  using Tile = KvTile<kFp8, DP>;
  const int row_bytes = static_cast<int>(a.layout.row_elements()) * Tile::kElement, chunks = row_bytes / 16;
  const uint8_t *from = static_cast<const uint8_t *>(a.pages) + static_cast<size_t>(page) * a.layout.page_bytes() + 2 * a.layout.block_bytes() * kv_head;
  // K's 16 rows, then V's, as in the page. Keys beyond the end are zeros: a weight of 0 must not meet a NaN.
  for (int i = static_cast<int>(lane_id()); i < 32 * Tile::kChunks; i += 32) {
    const int row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    const bool there = row % 16 < keys && chunk < chunks;
    cp_async16(to + row * Tile::kRow + chunk * 16, there ? from + row * row_bytes + chunk * 16 : from, there ? 16 : 0);
  }
}

template <bool kFp8, int DP>
LS_KERNEL LS_BOUNDS(kSplitWarps<DP> * 32, DP == 128 ? 3 : 1) void attention_split_kernel(AttentionArgs a, const AttentionTile *tiles, const int32_t *count) {
  constexpr int kWarps = kSplitWarps<DP>, kPage = kPageBytes<kFp8, DP>;
  const int warp = static_cast<int>(warp_id()), lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4;
  const int heads = static_cast<int>(a.layout.kv_heads), head_dim = static_cast<int>(a.layout.head_dim);
  uint8_t *stages = dyn_smem<uint8_t>() + 2 * kPage * warp;
  float *stats = reinterpret_cast<float *>(dyn_smem<uint8_t>() + 2 * kPage * kWarps);  // (warp, row, {top, sum})
  const float scale = a.scale * a.scales.k * kLog2e;
  const Widening wide = widening(a.layout.type);
  const int total = *count * heads;

  for (int item = static_cast<int>(block_x()); item < total; item += static_cast<int>(grid_x())) {
    const AttentionTile tile = tiles[item / heads];
    const int kv_head = item % heads, pages = (tile.key_end - tile.key_begin + 15) / 16;
    const int32_t *table = a.page_table + tile.page_offset + tile.key_begin / 16;
    const QueryRow rows[2] = {query_row(a, tile, kv_head, g), query_row(a, tile, kv_head, g + 8)};
    uint32_t q[DP / 16][4];
    load_queries<kFp8, DP>(q, rows, t, head_dim);

    float out[DP / 8][4] = {};
    Softmax softmax;
    // Page ids are read one page ahead of the staging, which is one page ahead of the arithmetic.
    const auto keys_of = [&](int page) { return tile.key_end - tile.key_begin - page * 16; };
    if (warp < pages) stage_page<kFp8, DP>(a, stages, table[warp], kv_head, keys_of(warp));
    cp_async_commit();
    int next_id = warp + kWarps < pages ? table[warp + kWarps] : 0;
    for (int page = warp, stage = 0; page < pages; page += kWarps, stage ^= 1) {
      if (page + kWarps < pages) stage_page<kFp8, DP>(a, stages + (stage ^ 1) * kPage, next_id, kv_head, keys_of(page + kWarps));
      cp_async_commit();
      next_id = page + 2 * kWarps < pages ? table[page + 2 * kWarps] : 0;
      cp_async_wait<1>();
      sync_warp();

      const uint8_t *k = stages + stage * kPage, *v = k + 16 * KvTile<kFp8, DP>::kRow;
      float s[2][4] = {};
      LS_UNROLL
      for (int i = 0; i < DP / 16; ++i) {
        uint32_t b[2][2];
        load_keys<kFp8, DP>(b, k, i, wide);
        mma_m16n8k16(s[0], q[i], b[0], s[0]);
        mma_m16n8k16(s[1], q[i], b[1], s[1]);
      }
      LS_UNROLL
      for (int n = 0; n < 2; ++n)
        LS_UNROLL
        for (int e = 0; e < 4; ++e) s[n][e] = tile.key_begin + page * 16 + n * 8 + 2 * t + e % 2 <= rows[e / 2].position ? s[n][e] * scale : kNoKey;
      float shrink[2];
      softmax.step(s, shrink);
      shrink_sums(out, shrink);
      add_values<kFp8, DP>(out, s[0], s[1], v, wide);
      sync_warp();  // the stage is free
    }
    softmax.finish();
    cp_async_wait<0>();

    // (16, DP) f32 of each warp over its stages.
    float *sums = reinterpret_cast<float *>(stages);
    static_assert(kTileRows * DP * sizeof(float) <= 2 * kPage);
    LS_UNROLL
    for (int n = 0; n < DP / 8; ++n)
      LS_UNROLL
      for (int e = 0; e < 4; ++e) sums[(g + e / 2 * 8) * DP + output_dim<kFp8>(n, 2 * t + e % 2)] = out[n][e];
    if (t == 0)
      LS_UNROLL
      for (int r = 0; r < 2; ++r) {
        stats[(warp * kTileRows + g + r * 8) * 2] = softmax.top[r];
        stats[(warp * kTileRows + g + r * 8) * 2 + 1] = softmax.sum[r];
      }
    sync_block();

    float *partial = static_cast<float *>(a.partial), *partial_stats = partial + static_cast<size_t>(a.partial_rows) * heads * DP;
    for (int i = static_cast<int>(thread_x()); i < tile.rows * DP; i += kWarps * 32) {
      const int row = i / DP, dim = i % DP;
      float top = kNoKey, weight = 0, sum = 0;
      LS_UNROLL
      for (int w = 0; w < kWarps; ++w) top = fmaxf(top, stats[(w * kTileRows + row) * 2]);
      const float base = top == kNoKey ? 0.0f : top;
      LS_UNROLL
      for (int w = 0; w < kWarps; ++w) {
        const float factor = exp2_fast(stats[(w * kTileRows + row) * 2] - base);
        weight += factor * stats[(w * kTileRows + row) * 2 + 1];
        sum += factor * reinterpret_cast<const float *>(dyn_smem<uint8_t>() + 2 * kPage * w)[row * DP + dim];
      }
      if (tile.partial >= 0) {
        const size_t at = static_cast<size_t>(tile.partial + row) * heads + kv_head;
        partial[at * DP + dim] = sum;
        if (dim == 0) partial_stats[at * 2] = top, partial_stats[at * 2 + 1] = weight;
      } else if (dim < head_dim) {
        const bf16 *q_row = query_row(a, tile, kv_head, row).q;
        static_cast<bf16 *>(a.out)[q_row - static_cast<const bf16 *>(a.q) + dim] = __float2bfloat16(sum / weight * a.scales.v);
      }
    }
    sync_block();  // shared memory is free
  }
}

}  // namespace

void attention_split(Stream stream, const AttentionArgs &args, const AttentionTile *tiles, const int32_t *count, uint32_t grid_tiles) {
  dispatch_kv(args.layout, [&]<bool kFp8, int DP>() {
    launch(attention_split_kernel<kFp8, DP>, Dim{grid_tiles * args.layout.kv_heads}, Dim{kSplitWarps<DP> * 32}, kSplitShared<kFp8, DP>, stream, args, tiles, count);
  });
}

}  // namespace ls::cuda
