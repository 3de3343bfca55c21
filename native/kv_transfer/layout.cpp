#include "layout.h"

#include <algorithm>

#include "bytes.h"
#include "config.h"

namespace ls::kv {
namespace {

constexpr uint32_t kLayoutVersion = 1;

struct Field {
  const char *name;
  uint32_t Layout::*member;
};
constexpr Field kFields[] = {{"layers", &Layout::layers}, {"kv_heads", &Layout::kv_heads}, {"head_dim", &Layout::head_dim}, {"page_tokens", &Layout::page_tokens},
                             {"cache dtype", &Layout::dtype}, {"page format", &Layout::format}, {"tensor-parallel ranks", &Layout::ranks}};

std::string hex(const Digest &digest) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < 8; ++i) text += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  return text + "...";
}

std::string show(const Field &field, uint32_t value) {
  if (field.member != &Layout::dtype) return std::to_string(value);
  const char *name = dtype_name(value);
  return name ? name : "dtype " + std::to_string(value);
}

}  // namespace

void encode_layout(const Layout &layout, uint8_t *out) {
  std::fill_n(out, kLayoutBytes, uint8_t{0});
  put(out, kLayoutVersion);
  for (size_t i = 0; i < std::size(kFields); ++i) put(out + 4 + 4 * i, layout.*kFields[i].member);
  put(out + 32, layout.page_bytes);
  std::copy(layout.model.begin(), layout.model.end(), out + 40);
  std::copy(layout.scales.begin(), layout.scales.end(), out + 72);
}

std::string decode_layout(std::span<const uint8_t> bytes, Layout &out) {
  if (bytes.size() != kLayoutBytes) return "layout has " + std::to_string(bytes.size()) + " bytes, expected " + std::to_string(kLayoutBytes);
  const uint8_t *at = bytes.data();
  if (const auto version = get<uint32_t>(at); version != kLayoutVersion) return "layout version is " + std::to_string(version) + ", expected " + std::to_string(kLayoutVersion);
  if (std::any_of(at + 104, at + kLayoutBytes, [](uint8_t b) { return b != 0; })) return "layout bytes 104..127 are not zero";
  for (size_t i = 0; i < std::size(kFields); ++i) out.*kFields[i].member = get<uint32_t>(at + 4 + 4 * i);
  out.page_bytes = get<uint64_t>(at + 32);
  std::copy_n(at + 40, 32, out.model.begin());
  std::copy_n(at + 72, 32, out.scales.begin());
  return {};
}

std::string layout_difference(const Layout &sender, const Layout &receiver, const char *sender_name, const char *receiver_name) {
  const auto differ = [&](const std::string &field, const std::string &a, const std::string &b) { return field + " is " + a + " on the " + sender_name + " and " + b + " on the " + receiver_name; };
  for (const Field &field : kFields)
    if (sender.*field.member != receiver.*field.member) return differ(field.name, show(field, sender.*field.member), show(field, receiver.*field.member));
  if (sender.page_bytes != receiver.page_bytes) return differ("page bytes", std::to_string(sender.page_bytes), std::to_string(receiver.page_bytes));
  if (sender.model != receiver.model) return differ("model configuration", hex(sender.model), hex(receiver.model));
  if (sender.scales != receiver.scales) return differ("cache scales", hex(sender.scales), hex(receiver.scales));
  return {};
}

}  // namespace ls::kv
