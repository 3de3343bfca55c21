// How transfers end: what ls_kv_events tells, and what must hold between sequences and transfers.
#include <algorithm>
#include <cstring>

#include "engine.h"

namespace ls {
namespace {

Status invalid(std::string text) { return Status::fail(LS_INVALID, std::move(text)); }

}  // namespace

// False: the pull of a sequence that was closed meanwhile.
bool Engine::apply_ending(const kv::Ending &ending) {
  if (ending.slot < 0) return true;
  Sequence &sequence = slots_[static_cast<size_t>(ending.slot)];
  if (sequence.serial != ending.serial || !sequence.pull) return false;
  sequence.pull.reset();
  if (ending.reason == LS_KV_DONE) sequence.completed = sequence.computed();
  else sequence.pull_failed = true;
  return true;
}

Status Engine::drain_transfers(int32_t *words, uint32_t capacity, uint32_t &written) {
  const std::lock_guard lock(mutex_);
  written = 0;
  if (phase_ != Phase::serving || !transfer_) return require_transfer("ls_kv_events");
  if (words == nullptr && capacity > 0) return invalid("words is NULL");
  capacity = std::min(capacity, static_cast<uint32_t>(INT32_MAX));
  const auto needed = [](const kv::Ending &ending) { return LS_KV_EVENT_WORDS + static_cast<uint32_t>((ending.text.size() + 3) / 4); };
  uint32_t refused = 0;
  kv::Ending ending;
  while (transfer_->endings.take(ending, [&](const kv::Ending &next) {
    refused = needed(next) > capacity - written ? needed(next) : 0;
    return refused == 0;
  })) {
    if (!apply_ending(ending)) continue;
    const uint32_t count = needed(ending);
    const uint32_t head[LS_KV_EVENT_WORDS] = {count, static_cast<uint32_t>(ending.slot), static_cast<uint32_t>(ending.reason), static_cast<uint32_t>(ending.id), static_cast<uint32_t>(ending.id >> 32),
                                              static_cast<uint32_t>(ending.bytes), static_cast<uint32_t>(ending.bytes >> 32), ending.micros, static_cast<uint32_t>(ending.text.size())};
    std::memset(words + written, 0, 4 * size_t{count});
    std::memcpy(words + written, head, sizeof head);
    std::memcpy(words + written + LS_KV_EVENT_WORDS, ending.text.data(), ending.text.size());
    written += count;
  }
  if (written == 0 && refused > 0) return invalid("capacity is " + std::to_string(capacity) + " words, the next event needs " + std::to_string(refused));
  return Status::good();
}

std::string Engine::check_transfers() const {
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    const Sequence &s = slots_[slot];
    const std::string name = "slot " + std::to_string(slot);
    if (!s.open && (s.pull || s.staged || s.pull_failed)) return name + " is closed and has a transfer";
    if ((s.pull || s.pull_failed) && s.completed != s.attached * LS_PAGE_TOKENS) return name + " counts tokens as computed that are being pulled";
    if (s.pull && s.pull->request().first_page != s.attached) return name + " pulls pages that it has";
    if (s.staged && (s.staged->planned > s.staged->pages() || s.staged->planned > s.pages.size())) return name + " stages pages that it does not have";
  }
  for (const int32_t slot : gated_)
    if (!slots_[static_cast<size_t>(slot)].pull) return "slot " + std::to_string(slot) + " is at the gate and pulls nothing";
  return {};
}

}  // namespace ls
