// Block tiles: many queries of one sequence against all keys that they may see. A warp owns 16 rows; all warps share the staged keys.
//   q (rows, head_dim) in registers, for DP 256 in shared memory    K, V (kKeys, head_dim) twice in shared memory    sums (16, head_dim) f32 a warp
#include "attention_fragments.cuh"

namespace ls::cuda {
namespace {

template <int DP>
constexpr int kBlockWarps = DP <= 128 ? 8 : 4;
template <int DP>
constexpr int kKeys = DP <= 128 ? 64 : 32;  // of a stage
template <bool kFp8, int DP>
constexpr int kStageBytes = 2 * kKeys<DP> * KvTile<kFp8, DP>::kRow;
// DP 256: rows of 512 bytes, their 16-byte pieces exchanged by row so that eight rows at one column lie in different banks.
template <int DP>
constexpr int kQueryBytes = DP <= 128 ? 0 : kBlockWarps<DP> * 16 * DP * 2;
template <bool kFp8, int DP>
constexpr size_t kBlockShared = 2 * kStageBytes<kFp8, DP> + kQueryBytes<DP> + 3 * kKeys<DP> / 16 * sizeof(int32_t);
static_assert(kBlockShared<false, 256> <= kMaxSharedBytes && kBlockShared<false, 128> <= kMaxSharedBytes);

LS_DEVICE uint8_t *query_piece(uint8_t *q, int row, int piece) { return q + row * 512 + ((piece ^ (row & 7)) << 4); }

template <bool kFp8, int DP>
LS_DEVICE void stage_keys(const AttentionArgs &a, uint8_t *to, const int32_t *page_ids, int kv_head, int keys) {
  using Tile = KvTile<kFp8, DP>;
  constexpr int kThreads = kBlockWarps<DP> * 32;
  const int row_bytes = static_cast<int>(a.layout.row_elements()) * Tile::kElement, chunks = row_bytes / 16;
  const size_t page_bytes = a.layout.page_bytes(), block_bytes = a.layout.block_bytes();
  const uint8_t *head = static_cast<const uint8_t *>(a.pages) + 2 * block_bytes * kv_head;
  LS_UNROLL_BY(DP > 128 ? 2 : 4)
  for (int first = 0; first < kKeys<DP> * Tile::kChunks; first += kThreads) {
    const int i = first + static_cast<int>(thread_x()), row = i / Tile::kChunks, chunk = i % Tile::kChunks;
    if (kKeys<DP> * Tile::kChunks % kThreads && i >= kKeys<DP> * Tile::kChunks) break;
    const bool there = row < keys && chunk < chunks;
    const uint8_t *from = there ? head + static_cast<size_t>(page_ids[row / 16]) * page_bytes + row % 16 * row_bytes + chunk * 16 : head;
    uint8_t *at = to + row * Tile::kRow + chunk * 16;
    cp_async16(at, from, there ? 16 : 0);
    cp_async16(at + kKeys<DP> * Tile::kRow, there ? from + block_bytes : from, there ? 16 : 0);
  }
}

template <bool kFp8, int DP>
LS_KERNEL LS_BOUNDS(kBlockWarps<DP> * 32, 1) void attention_block_kernel(AttentionArgs a, const AttentionTile *tiles, const int32_t *count) {
  constexpr int kRow = KvTile<kFp8, DP>::kRow, kStage = kStageBytes<kFp8, DP>, kN = kKeys<DP> / 8, kIds = kKeys<DP> / 16;
  const int thread = static_cast<int>(thread_x()), lane = static_cast<int>(lane_id()), g = lane / 4, t = lane % 4, warp_row = static_cast<int>(warp_id()) * 16;
  const int heads = static_cast<int>(a.layout.kv_heads), head_dim = static_cast<int>(a.layout.head_dim);
  uint8_t *stages = dyn_smem<uint8_t>(), *queries = stages + 2 * kStage;
  int32_t *page_ids = reinterpret_cast<int32_t *>(queries + kQueryBytes<DP>);  // (3, kIds), of stage i in i % 3
  const float scale = a.scale * a.scales.k * kLog2e;
  const Widening wide = widening(a.layout.type);
  const int total = *count * heads;

  for (int item = static_cast<int>(block_x()); item < total; item += static_cast<int>(grid_x())) {
    const AttentionTile tile = tiles[item / heads];
    const int kv_head = item % heads, stage_count = (tile.key_end + kKeys<DP> - 1) / kKeys<DP>, page_count = (tile.key_end + 15) / 16;
    const int32_t *table = a.page_table + tile.page_offset;
    const auto page_id = [&](int index) { return index < page_count ? table[index] : 0; };

    const QueryRow rows[2] = {query_row(a, tile, kv_head, warp_row + g), query_row(a, tile, kv_head, warp_row + g + 8)};
    uint32_t q[DP <= 128 ? DP / 16 : 1][4];
    if constexpr (DP <= 128) {
      load_queries<kFp8, DP>(q, rows, t, head_dim);
    } else {
      // As ldmatrix will read them: register half h of lane t is at columns 8h + 2t.
      for (int k = 0; k < DP / 16; ++k)
        for (int r = 0; r < 4; ++r)
          *reinterpret_cast<uint32_t *>(query_piece(queries, warp_row + g + r % 2 * 8, 2 * k + r / 2) + 4 * t) = load_query(rows[r % 2].q, k * 16 + query_dim<kFp8>(t, r / 2, 0), head_dim);
    }
    // Positions rise with the row, so the warp's first and last say which keys need a look at all and which need a mask.
    const int last_row = warp_row + 15 < tile.rows ? warp_row + 15 : tile.rows - 1, group = static_cast<int>(a.heads) / heads;
    const int warp_first = tile.start + (tile.first + warp_row) / group, warp_last = warp_row < tile.rows ? tile.start + (tile.first + last_row) / group : -1;

    if (thread < 2 * kIds) page_ids[thread] = page_id(thread);
    sync_block();
    stage_keys<kFp8, DP>(a, stages, page_ids, kv_head, tile.key_end);
    cp_async_commit();

    float out[DP / 8][4] = {};
    Softmax softmax;
    for (int stage = 0; stage < stage_count; ++stage) {
      const int key0 = stage * kKeys<DP>;
      const int32_t ahead = thread < kIds ? page_id((stage + 2) * kIds + thread) : 0;
      cp_async_wait<0>();
      sync_block();  // the stage is there for all, and nobody reads the other one any more
      if (stage + 1 < stage_count) stage_keys<kFp8, DP>(a, stages + (stage + 1) % 2 * kStage, page_ids + (stage + 1) % 3 * kIds, kv_head, tile.key_end - key0 - kKeys<DP>);
      cp_async_commit();

      if (key0 <= warp_last) {
        const uint8_t *k = stages + stage % 2 * kStage, *v = k + kKeys<DP> * kRow;
        float s[kN][4] = {};
        LS_UNROLL_BY(DP > 128 ? 2 : 8)
        for (int i = 0; i < DP / 16; ++i) {
          uint32_t a_regs[4];
          if constexpr (DP > 128) ldmatrix_x4(a_regs, query_piece(queries, warp_row + lane % 16, 2 * i + lane / 16));
          LS_UNROLL
          for (int n = 0; n < kN; n += 2) {
            uint32_t b[2][2];
            load_keys<kFp8, DP>(b, k + n * 8 * kRow, i, wide);
            const uint32_t *operand = DP > 128 ? a_regs : q[DP > 128 ? 0 : i];
            mma_m16n8k16(s[n], operand, b[0], s[n]);
            mma_m16n8k16(s[n + 1], operand, b[1], s[n + 1]);
          }
        }
        const bool masked = key0 + kKeys<DP> - 1 > warp_first || warp_row + 16 > tile.rows;
        LS_UNROLL
        for (int n = 0; n < kN; ++n)
          LS_UNROLL
          for (int e = 0; e < 4; ++e) s[n][e] = !masked || key0 + n * 8 + 2 * t + e % 2 <= rows[e / 2].position ? s[n][e] * scale : kNoKey;
        float shrink[2];
        softmax.step(s, shrink);
        shrink_sums(out, shrink);
        LS_UNROLL
        for (int n = 0; n < kN; n += 2) add_values<kFp8, DP>(out, s[n], s[n + 1], v + n * 8 * kRow, wide);
      }
      if (thread < kIds) page_ids[(stage + 2) % 3 * kIds + thread] = ahead;
    }
    cp_async_wait<0>();

    softmax.finish();
    LS_UNROLL
    for (int r = 0; r < 2; ++r) {
      if (!rows[r].q) continue;
      bf16 *to = static_cast<bf16 *>(a.out) + (rows[r].q - static_cast<const bf16 *>(a.q));
      const float factor = a.scales.v / softmax.sum[r];
      LS_UNROLL
      for (int n = 0; n < DP / 8; ++n) {
        const int dim = output_dim<kFp8>(n, 2 * t);
        if constexpr (!kFp8) {
          if (dim < head_dim) *reinterpret_cast<uint32_t *>(to + dim) = pack_bf16(out[n][2 * r] * factor, out[n][2 * r + 1] * factor);
        } else {
          LS_UNROLL
          for (int e = 0; e < 2; ++e)
            if (dim + 4 * e < head_dim) to[dim + 4 * e] = __float2bfloat16(out[n][2 * r + e] * factor);
        }
      }
    }
    sync_block();  // shared memory is free
  }
}

}  // namespace

void attention_block(Stream stream, const AttentionArgs &args, const AttentionTile *tiles, const int32_t *count, uint32_t grid_tiles) {
  dispatch_kv(args.layout, [&]<bool kFp8, int DP>() {
    launch(attention_block_kernel<kFp8, DP>, Dim{grid_tiles * args.layout.kv_heads}, Dim{kBlockWarps<DP> * 32}, kBlockShared<kFp8, DP>, stream, args, tiles, count);
  });
}

}  // namespace ls::cuda
