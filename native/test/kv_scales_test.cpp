// Scales of an fp8 cache: what is refused, what reaches the device, and that engines with other scales do not exchange KV.
#include <cmath>
#include <limits>

#include "check.h"
#include "kv_support.h"

using namespace ls::test;

namespace {

// Layers of small_config.
constexpr uint32_t kLayers = 2;
const std::vector<float> kScales = {0.5f, 0.25f, 0.03f, 7.0f};

Options fp8(std::vector<float> scales = {}, uint32_t dtype = LS_KV_E4M3) {
  Options options;
  options.kv_dtype = dtype;
  options.kv_scales = std::move(scales);
  return options;
}

void refused(int32_t code, int32_t wanted, const std::string &part) {
  if (code != wanted || last_error().find(part) == std::string::npos) check::fail(__FILE__, __LINE__, "expected " + std::to_string(wanted) + " with \"" + part + "\", got " + std::to_string(code) + ": " + last_error());
}

}  // namespace

TEST("kv scales: they reach the device whole, and the last call counts") {
  ls_config config = small_config(fp8());
  ls_engine *engine = nullptr;
  CHECK_EQ(ls_engine_create(&config, small_inv_freq(config).data(), &engine), LS_OK);
  CHECK(device().kv_scales.empty());
  const std::vector<float> first(2 * kLayers, 3.0f);
  CHECK_EQ(ls_kv_scales(engine, first.data(), kLayers), LS_OK);
  CHECK_EQ(ls_kv_scales(engine, kScales.data(), kLayers), LS_OK);
  CHECK(device().kv_scales == kScales);
  ls_engine_destroy(engine);
}

TEST("kv scales: a bad value is refused with layer and side, and changes nothing") {
  ls_config config = small_config(fp8({}, LS_KV_E5M2));
  ls_engine *engine = nullptr;
  CHECK_EQ(ls_engine_create(&config, small_inv_freq(config).data(), &engine), LS_OK);
  CHECK_EQ(ls_kv_scales(engine, kScales.data(), kLayers), LS_OK);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -0.0f, -1.0f, kInfinity, -kInfinity, std::nanf("")})
    for (uint32_t i = 0; i < 2 * kLayers; ++i) {
      std::vector<float> scales = {1, 2, 3, 4};
      scales[i] = bad;
      refused(ls_kv_scales(engine, scales.data(), kLayers), LS_INVALID, std::string(i % 2 ? "v" : "k") + " scale of layer " + std::to_string(i / 2) + " is ");
    }
  refused(ls_kv_scales(engine, nullptr, kLayers), LS_INVALID, "scales is NULL");
  refused(ls_kv_scales(engine, kScales.data(), kLayers - 1), LS_INVALID, "scales of 1 layers, expected 2");
  CHECK(device().kv_scales == kScales);
  refused(ls_kv_scales(nullptr, kScales.data(), kLayers), LS_INVALID, "engine is NULL");
  CHECK_EQ(load_zeros(engine, config), LS_OK);
  CHECK_EQ(ls_weights_finish(engine), LS_OK);
  refused(ls_kv_scales(engine, kScales.data(), kLayers), LS_STATE, "ls_kv_scales is called before ls_weights_finish only");
  ls_engine_destroy(engine);
}

TEST("kv scales: a cache of plain numbers has none") {
  for (const uint32_t dtype : {LS_KV_F32, LS_KV_BF16}) {
    ls_config config = small_config(fp8({}, dtype));
    ls_engine *engine = nullptr;
    CHECK_EQ(ls_engine_create(&config, small_inv_freq(config).data(), &engine), LS_OK);
    refused(ls_kv_scales(engine, kScales.data(), kLayers), LS_UNSUPPORTED, "kv_dtype " + std::to_string(dtype) + " has no scales");
    CHECK(device().kv_scales.empty());
    ls_engine_destroy(engine);
  }
}

TEST("kv scales: engines with the same ones agree, whoever has others is refused by name") {
  const Tokens prompt = range(3, 40);
  const std::vector<float> ones(2 * kLayers, 1.0f);
  KvRig from(fp8(kScales)), same(fp8(kScales)), plain(fp8()), unit(fp8(ones));
  // Scales of 1 are what an engine without any has.
  CHECK(unit.layout == plain.layout);
  CHECK(same.layout == from.layout);
  const PullOpened pull = same.open_pull(from, from.prefill(prompt), prompt);
  CHECK_EQ(pull.code, LS_OK);
  CHECK_EQ(same.event().reason, LS_KV_DONE);
  same.expect_decode(pull.slot, prompt);

  // One value of one layer, or two that changed places.
  std::vector<std::vector<float>> others{ones, {0.5f, 0.25f, 7.0f, 0.03f}, {0.25f, 0.5f, 0.03f, 7.0f}, {0.03f, 7.0f, 0.5f, 0.25f}};
  for (size_t i = 0; i < kScales.size(); ++i) {
    others.push_back(kScales);
    others.back()[i] = std::nextafter(kScales[i], 1.0f);
  }
  for (const std::vector<float> &scales : others) {
    KvRig other(fp8(scales));
    const std::string before = other.snapshot();
    refused(other.open_pull(from, from.prefill(prompt), prompt).code, LS_LAYOUT, "cache scales is ");
    CHECK_EQ(other.snapshot(), before);
  }
  KvRig bf16(fp8({}, LS_KV_BF16));
  const bool zeros = std::all_of(bf16.layout.begin() + 72, bf16.layout.begin() + 104, [](uint8_t byte) { return byte == 0; });
  CHECK(zeros);
}
