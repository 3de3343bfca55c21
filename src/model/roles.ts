/** What a tensor is to the native library: the ls_role values of native/layerscale.h (a test compares the two). */
export const ROLE = {
  embedding: 1,
  finalNorm: 2,
  lmHead: 3,
  attnNorm: 16,
  q: 17,
  k: 18,
  v: 19,
  o: 20,
  qBias: 21,
  kBias: 22,
  vBias: 23,
  oBias: 24,
  qNorm: 25,
  kNorm: 26,
  ffnNorm: 27,
  gate: 28,
  up: 29,
  down: 30,
} as const;

export type RoleName = keyof typeof ROLE;

/** LS_MAX_LAYERS and LS_MAX_HEAD_DIM of native/layerscale.h. */
export const MAX_LAYERS = 1024;
export const MAX_HEAD_DIM = 512;

/** Tensor id of the ABI: layer * 256 + role; global roles use layer 0. */
export function tensorId(role: RoleName, layer: number): number {
  return layer * 256 + ROLE[role];
}
