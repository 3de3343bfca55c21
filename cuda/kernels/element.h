// Element types of activations.
#pragma once
#include <cstdint>

namespace ls::cuda {

enum class Element : uint32_t { f32, bf16 };
constexpr uint32_t element_bytes(Element type) { return type == Element::f32 ? 4 : 2; }

}  // namespace ls::cuda
