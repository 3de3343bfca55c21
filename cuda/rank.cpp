#include "rank.h"

#include <algorithm>
#include <string>

#include "kernels/activation.h"
#include "kernels/embedding.h"
#include "kernels/page_copy.h"
#include "kernels/rmsnorm.h"
#include "kernels/rope.h"

namespace ls::cuda {
namespace {

constexpr uint32_t kMaxGraphRows = 256;  // larger decode steps keep the device busy longer than the host needs to launch them

KvType kv_type(uint32_t dtype) { return dtype == LS_KV_E4M3 ? KvType::e4m3 : dtype == LS_KV_E5M2 ? KvType::e5m2 : KvType::bf16; }

Status first_failure(std::initializer_list<Status> all) {
  for (const Status &status : all)
    if (!status.ok()) return status;
  return Status::good();
}

}  // namespace

std::vector<uint32_t> graph_buckets(uint32_t rows) {
  std::vector<uint32_t> all;
  const uint32_t most = std::min(rows, kMaxGraphRows);
  for (uint32_t size = 1; size < most; size += size < 8 ? size : size < 64 ? 8 : 16) all.push_back(size);
  all.push_back(most);
  return all;
}

Rank::Rank(const ls_config &config, const float *inv_freq, const PlanLimits &limits, int device, uint32_t rank, uint32_t ranks)
    : config_(config), limits_(limits), device_(device), rank_(rank), ranks_(ranks), heads_(config.heads / ranks), kv_heads_(config.kv_heads / ranks), wide_(config.intermediate / ranks),
      inv_freq_host_(inv_freq, inv_freq + config.head_dim / 2), layout_{kv_heads_, config.head_dim, kv_type(config.kv_dtype)}, scales_(config.layers), weights_(config, rank, ranks) {}

// The device of the owners' memory must be in use, and nothing may run on it any more.
Rank::~Rank() {
  use_device(device_);
  drain();
}

void Rank::set_kv_scales(const float *scales) {
  for (size_t l = 0; l < scales_.size(); ++l) scales_[l] = {scales[2 * l], scales[2 * l + 1]};
}

Status Rank::open() {
  if (Status status = use_device(device_); !status.ok()) return status;
  if (Status status = memory_info(memory_.free_at_start, memory_.total); !status.ok()) return status;
  if (Status status = stream_create(stream_.out()); !status.ok()) return status;
  for (OwnedEvent &event : done_)
    if (Status status = event_create(event.out()); !status.ok()) return status;
  layer_events_.resize(config_.layers);
  for (OwnedEvent &event : layer_events_)
    if (Status status = event_create(event.out()); !status.ok()) return status;
  return Status::good();
}

Status Rank::use_nccl(NcclGroup *nccl) {
  nccl_ = nccl;
  uint64_t free_now = 0, total = 0;
  Status status = memory_info(free_now, total);
  memory_.workspace = memory_.free_at_start > free_now ? memory_.free_at_start - free_now : 0;
  return status;
}

Status Rank::load(uint32_t threads, std::atomic<int32_t> &permille) {
  if (Status status = weights_.load(device_, threads, permille); !status.ok()) return status;
  memory_.weights = weights_.bytes();
  uint64_t before = 0, after = 0, total = 0;
  if (Status status = memory_info(before, total); !status.ok()) return status;
  if (Status status = allocate(); !status.ok()) return status;
  if (Status status = memory_info(after, total); !status.ok()) return status;
  memory_.workspace += before > after ? before - after : 0;
  return Status::good();
}

Status Rank::allocate() {
  const size_t tokens = limits_.tokens, rows = limits_.rows, hidden = config_.hidden, dim = config_.head_dim;
  const uint32_t head_rows = std::min(limits_.rows, kHeadRows);
  const uint32_t partial_rows = limits_.partial_rows;
  const Status made = first_failure({
      plan_.alloc(limits_.capacity_words() * 4), x_.alloc(tokens * hidden * 4), h_.alloc(tokens * hidden * 2), q_.alloc(tokens * heads_ * dim * 2), k_.alloc(tokens * kv_heads_ * dim * 2),
      v_.alloc(tokens * kv_heads_ * dim * 2), mixed_.alloc(tokens * heads_ * dim * 2), gate_.alloc(tokens * wide_ * 2), up_.alloc(tokens * wide_ * 2), act_.alloc(tokens * wide_ * 2),
      table_.alloc(tokens * dim * 4), last_.alloc(rows * hidden * 2), logits_.alloc(size_t{head_rows} * config_.vocab * 4), results_.alloc(rows * sizeof(SampleResult)), carry_.alloc(rows * 4),
      scratch_.alloc(sample_scratch_bytes(head_rows, config_.vocab)), partial_.alloc(std::max<size_t>(attention_partial_bytes(partial_rows, kv_heads_, config_.head_dim), 16)),
      inv_freq_.alloc(inv_freq_host_.size() * 4), layers_.alloc(config_.layers * sizeof(void *))});
  if (!made.ok()) return made;
  if (ranks_ > 1) {
    group_.max_elements = tokens * hidden;
    if (Status status = part_.alloc(tokens * hidden * 4); !status.ok()) return status;
  }
  if (ranks_ > 1 && nccl_ == nullptr) {
    if (Status status = first_failure({reduce_area_.alloc(all_reduce_bytes(group_.max_elements)), reduce_error_.alloc(64)}); !status.ok()) return status;
    if (Status status = fill_async(reduce_area_.as<void>(), 0, reduce_area_.bytes(), stream_.get()); !status.ok()) return status;
    *reduce_error_.as<volatile int32_t>() = 0;
    group_.error = reduce_error_.as<int32_t>();
  }
  if (Status status = fill_async(carry_.as<void>(), 0, carry_.bytes(), stream_.get()); !status.ok()) return status;
  if (Status status = copy_now(inv_freq_.as<void>(), inv_freq_host_.data(), inv_freq_host_.size() * 4); !status.ok()) return status;
  return stream_sync(stream_.get());
}

// The first sum of NCCL connects the ranks; it would do so inside a capture else.
Status Rank::join(const std::vector<void *> &areas) {
  group_.rank = rank_;
  group_.ranks = ranks_;
  std::copy(areas.begin(), areas.end(), group_.areas);
  if (ranks_ > 1)
    if (Status status = load_kernels(); !status.ok()) return status;
  if (nccl_ == nullptr) return Status::good();
  if (Status status = fill_async(part_.as<void>(), 0, part_.bytes(), stream_.get()); !status.ok()) return status;
  if (Status status = nccl_->all_reduce(rank_, part_.as<float>(), group_.max_elements, stream_.get()); !status.ok()) return status;
  return stream_sync(stream_.get());
}

// Every kernel that a step may launch, by steps of every size that has kernels of its own.
Status Rank::load_kernels() {
  const OnlyLoad only;
  for (const uint32_t tokens : {8u, 16u, 64u, limits_.tokens}) {
    StepShape shape = fixed_regions(limits_, std::min(tokens, limits_.tokens), std::min({tokens, limits_.rows, kHeadRows}));
    shape.grid_split = shape.grid_folds = shape.grid_block = 1;
    if (Status status = forward(shape, false); !status.ok()) return status;
  }
  page_copy(stream_.get(), layers_.as<void *const>(), config_.layers, layout_.page_bytes(), nullptr, nullptr);
  return launch_status();
}

Status Rank::place_pool(uint32_t pages) {
  pages_ = pages;
  const size_t layer_bytes = size_t{pages} * layout_.page_bytes();
  if (Status status = pool_.alloc(layer_bytes * config_.layers); !status.ok()) return status;
  std::vector<void *> bases(config_.layers);
  for (uint32_t l = 0; l < config_.layers; ++l) bases[l] = pool_.as<uint8_t>() + l * layer_bytes;
  return copy_now(layers_.as<void>(), bases.data(), bases.size() * sizeof(void *));
}

// Graphs hold addresses of pages, so those of the real pool are captured later; they take as much.
Status Rank::measure_graphs() {
  uint64_t before = 0, after = 0, total = 0;
  if (Status status = place_pool(1); !status.ok()) return status;
  if (Status status = memory_info(before, total); !status.ok()) return status;
  Status status = capture_graphs();
  if (status.ok()) status = memory_info(after, total);
  memory_.graphs = before > after ? before - after : 0;
  graphs_.clear();
  pool_.reset();
  pages_ = 0;
  uint64_t free_now = 0;
  if (status.ok()) status = memory_info(free_now, total);
  memory_.free_now = free_now;
  return status;
}

Status Rank::create_pool(uint32_t pages) {
  if (Status status = place_pool(pages); !status.ok()) return status;
  return capture_graphs();
}

Status Rank::capture_graphs() {
  buckets_ = graph_buckets(limits_.rows);
  graphs_.clear();
  graphs_.resize(buckets_.size());
  for (size_t i = 0; i < buckets_.size(); ++i) {
    StepShape shape = fixed_regions(limits_, buckets_[i], buckets_[i]);
    graph_grids(limits_, shape);
    if (Status status = capture_begin(stream_.get()); !status.ok()) return status;
    Status launched = forward(shape, false), ended = capture_end(stream_.get(), graphs_[i].out());
    if (!launched.ok()) return launched;
    if (!ended.ok()) return ended;
  }
  return stream_sync(stream_.get());
}

Status Rank::launch(const StepShape &shape, const int32_t *plan, SampleResult *results, uint32_t slot, bool layer_events) {
  if (nccl_ != nullptr)  // a graph must not reach a communicator that is gone
    if (Status status = nccl_->failure(); !status.ok()) return status;
  if (Status status = copy_async(plan_.as<void>(), plan, size_t{shape.words} * 4, stream_.get()); !status.ok()) return status;
  if (shape.copies > 0) {
    const int32_t *words = plan_.as<int32_t>();
    page_copy(stream_.get(), layers_.as<void *const>(), config_.layers, layout_.page_bytes(), words + shape.at_copies, words + 3);
    if (Status status = launch_status(); !status.ok()) return status;
  }
  const size_t bucket = static_cast<size_t>(std::lower_bound(buckets_.begin(), buckets_.end(), shape.tokens) - buckets_.begin());
  if (Status status = shape.graph ? graph_launch(graphs_[bucket].get(), stream_.get()) : forward(shape, layer_events); !status.ok()) return status;
  if (results != nullptr && shape.real_sampled > 0)
    if (Status status = copy_async(results, results_.as<void>(), shape.real_sampled * sizeof(SampleResult), stream_.get()); !status.ok()) return status;
  return event_record(done_[slot].get(), stream_.get());
}

void Rank::attention(const StepShape &shape, uint32_t layer) {
  const int32_t *words = plan_.as<int32_t>();
  AttentionArgs args;
  args.q = q_.as<void>();
  args.out = mixed_.as<void>();
  args.pages = page(layer, 0);
  args.page_table = words;
  args.layout = layout_;
  args.scales = scales_[layer];
  args.heads = heads_;
  args.scale = config_.attn_scale;
  args.partial = partial_.as<void>();
  args.partial_rows = limits_.partial_rows;
  if (shape.grid_split > 0) attention_split(stream_.get(), args, reinterpret_cast<const AttentionTile *>(words + shape.at_split), words, shape.grid_split);
  if (shape.grid_block > 0) attention_block(stream_.get(), args, reinterpret_cast<const AttentionTile *>(words + shape.at_block), words + 2, shape.grid_block);
  if (shape.grid_folds > 0) attention_fold(stream_.get(), args, reinterpret_cast<const AttentionFold *>(words + shape.at_folds), words + 1, shape.grid_folds);
}

// Adds a product to the residual stream, on all ranks.
Status Rank::project(const void *x, uint32_t rows, const Linear &w) {
  const LinearOut out{&w, ranks_ == 1 ? x_.as<void>() : part_.as<void>(), Element::f32, config_.hidden, ranks_ == 1};
  linear_forward(stream_.get(), x, rows, w.cols, &out, 1);
  if (ranks_ == 1) return Status::good();
  const size_t n = size_t{rows} * config_.hidden;
  if (nccl_ == nullptr) {
    all_reduce_add(stream_.get(), group_, part_.as<void>(), Element::f32, x_.as<float>(), n);
    return Status::good();
  }
  if (!OnlyLoad::active)
    if (Status status = nccl_->all_reduce(rank_, part_.as<float>(), n, stream_.get()); !status.ok()) return status;
  residual_add(stream_.get(), part_.as<float>(), x_.as<float>(), n);
  return Status::good();
}

Status Rank::forward(const StepShape &shape, bool layer_events) {
  const Stream stream = stream_.get();
  const int32_t *words = plan_.as<int32_t>();
  const uint32_t tokens = shape.tokens, hidden = config_.hidden, dim = config_.head_dim, q_width = heads_ * dim, kv_width = kv_heads_ * dim;
  if (weights_.tied()) linear_gather(stream, weights_.head(), words + shape.at_tokens, carry_.as<int32_t>(), tokens, x_.as<float>());
  else embedding(stream, weights_.embedding(), weights_.embedding_dtype(), config_.vocab, hidden, words + shape.at_tokens, carry_.as<int32_t>(), tokens, x_.as<float>());
  rope_table(stream, words + shape.at_positions, inv_freq_.as<float>(), tokens, dim, config_.rope_scale, table_.as<float>());

  RmsNorm norm;
  norm.x = x_.as<float>();
  norm.y = h_.as<void>();
  norm.rows = tokens;
  norm.n = hidden;
  norm.eps = config_.rms_eps;
  QkvPrepare prepare;
  prepare.q = prepare.q_out = q_.as<void>();
  prepare.k = k_.as<void>();
  prepare.v = v_.as<void>();
  prepare.q_ld = q_width;
  prepare.kv_ld = kv_width;
  prepare.eps = config_.rms_eps;
  prepare.table = table_.as<float>();
  prepare.style = static_cast<ls_rope_style>(config_.rope_style);
  prepare.places = words + shape.at_places;
  prepare.layout = layout_;
  prepare.tokens = tokens;
  prepare.heads = heads_;
  for (uint32_t l = 0; l < config_.layers; ++l) {
    const Layer &layer = weights_.layer(l);
    norm.weight = layer.attn_norm;
    rmsnorm(stream, norm);
    const LinearOut qkv[3] = {{&layer.q, q_.as<void>(), Element::bf16, q_width, false}, {&layer.k, k_.as<void>(), Element::bf16, kv_width, false}, {&layer.v, v_.as<void>(), Element::bf16, kv_width, false}};
    linear_forward(stream, h_.as<void>(), tokens, hidden, qkv, 3);
    prepare.q_norm = layer.q_norm;
    prepare.k_norm = layer.k_norm;
    prepare.pages = page(l, 0);
    prepare.scales = scales_[l];
    qkv_prepare(stream, prepare);
    if (layer_events)
      if (Status status = event_record(layer_events_[l].get(), stream); !status.ok()) return status;
    attention(shape, l);
    if (Status status = project(mixed_.as<void>(), tokens, layer.o); !status.ok()) return status;
    norm.weight = layer.ffn_norm;
    rmsnorm(stream, norm);
    const LinearOut wide[2] = {{&layer.gate, gate_.as<void>(), Element::bf16, wide_, false}, {&layer.up, up_.as<void>(), Element::bf16, wide_, false}};
    linear_forward(stream, h_.as<void>(), tokens, hidden, wide, 2);
    silu_mul(stream, gate_.as<void>(), up_.as<void>(), wide_, Element::bf16, act_.as<void>(), tokens, wide_);
    if (Status status = project(act_.as<void>(), tokens, layer.down); !status.ok()) return status;
  }
  head(shape);
  // A step that is submitted ahead begins with these tokens: the same on all ranks, whatever NCCL's sums are.
  if (nccl_ != nullptr && shape.sampled > 0 && !OnlyLoad::active)
    if (Status status = nccl_->share(rank_, carry_.as<int32_t>(), limits_.rows, stream); !status.ok()) return status;
  return launch_status();
}

// Every rank chooses every token, from the same bits: nobody waits for a message.
void Rank::head(const StepShape &shape) {
  const int32_t *words = plan_.as<int32_t>();
  RmsNorm norm;
  norm.x = x_.as<float>();
  norm.weight = weights_.final_norm();
  norm.index = words + shape.at_sampled;
  norm.y = last_.as<void>();
  norm.rows = shape.sampled;
  norm.n = config_.hidden;
  norm.eps = config_.rms_eps;
  if (shape.sampled > 0) rmsnorm(stream_.get(), norm);
  const auto *params = reinterpret_cast<const SampleParams *>(words + shape.at_params);
  for (uint32_t first = 0, chunk = 0; first < shape.sampled; first += kHeadRows, ++chunk) {
    const uint32_t rows = std::min(kHeadRows, shape.sampled - first);
    const LinearOut out{&weights_.head(), logits_.as<void>(), Element::f32, config_.vocab, false};
    linear_forward(stream_.get(), last_.as<uint16_t>() + size_t{first} * config_.hidden, rows, config_.hidden, &out, 1);
    sample(stream_.get(), logits_.as<float>(), config_.vocab, config_.vocab, params + first, words + kCounts + chunk, rows, results_.as<SampleResult>() + first, carry_.as<int32_t>(), scratch_.as<void>());
  }
}

}  // namespace ls::cuda
