import { expect, test } from "bun:test";
import { jsonCodec, msgpackCodec } from "../../../src/dynamo/protocol/codec.ts";
import { TokenItem } from "../../../src/dynamo/protocol/engine-output.ts";

const lists = [[0], [1], [127, 128, 255, 256], [65_535, 65_536, 4_294_967_295], Array.from({ length: 15 }, (_, i) => i), Array.from({ length: 16 }, (_, i) => i * 1000), Array.from({ length: 70_000 }, (_, i) => i)];

test.each([jsonCodec, msgpackCodec])("$name: the bytes that the codec would give", (codec) => {
  for (const ids of lists) {
    const item = new TokenItem(ids);
    const bytes = item.encode(codec);
    expect(bytes.equals(codec.encode({ data: item, complete_final: false }))).toBe(true);
    expect(codec.decode(bytes)).toEqual({ data: { data: { token_ids: ids } }, complete_final: false });
  }
});
