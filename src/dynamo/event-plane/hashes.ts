/** Block hashes as Dynamo's router computes them. All 64-bit, as bigint. */

const U64 = (1n << 64n) - 1n;
/** Seed of unsalted blocks and of the chain. */
const SEED = 1337n;
const PRIME_1 = 0x9e3779b185ebca87n;
const AVALANCHE = 0x165667919e3779f9n;
/** First eight words of XXH3's default secret: all that an input of 64 bytes touches. */
const SECRET = [
  0xbe4ba423396cfeb8n, 0x1cad21f72c81017cn, 0xdb979083e96dd4den, 0x1f67b3b7a4a44072n,
  0x78e5c0cc4ee679cbn, 0x2172ffcc7dd05a82n, 0x8e2443f7744608b8n, 0x4c263a81e69035e0n,
] as const;

const fold = (a: bigint, b: bigint): bigint => {
  const product = a * b;
  return (product & U64) ^ (product >> 64n);
};

/** XXH3 of exactly 64 bytes with a whole 64-bit seed; the runtime's own keeps only 32 bits of a seed. */
export function xxh3Of64Bytes(bytes: Uint8Array, seed: bigint): bigint {
  const view = new DataView(bytes.buffer, bytes.byteOffset, 64);
  let acc = (64n * PRIME_1) & U64;
  for (let i = 0; i < 4; i++) {
    // Mixed in the order 16, 32, 0, 48 by the reference; addition does not care, the secret pairing does.
    const at = [16, 32, 0, 48][i]!;
    const pair = [4, 6, 0, 2][i]!;
    const low = view.getBigUint64(at, true) ^ ((SECRET[pair]! + seed) & U64);
    const high = view.getBigUint64(at + 8, true) ^ ((SECRET[pair + 1]! - seed) & U64);
    acc = (acc + fold(low, high)) & U64;
  }
  acc ^= acc >> 37n;
  acc = (acc * AVALANCHE) & U64;
  return acc ^ (acc >> 32n);
}

/**
 * Hash of one full block, whatever stands before it.
 * @param tokenIds 16 ids below 2^32
 * @param domain cache domain of the sequence: XXH3 of its salt, 0n without one
 */
export function tokensHash(tokenIds: readonly number[], domain: bigint): bigint {
  const bytes = new Uint8Array(Uint32Array.from(tokenIds).buffer);
  if (domain === 0n || bytes.length !== 64) return Bun.hash.xxHash3(bytes, SEED) as bigint;
  return xxh3Of64Bytes(bytes, (SEED + domain) & U64);
}

/** Names a block together with everything before it; the same in every worker. The salt travels in the first block's hash. */
export function sequenceHash(parent: bigint | null, tokens: bigint): bigint {
  if (parent === null) return tokens;
  const link = Buffer.allocUnsafe(16);
  link.writeBigUInt64LE(parent, 0);
  link.writeBigUInt64LE(tokens, 8);
  return Bun.hash.xxHash3(link, SEED) as bigint;
}
