import { describe, expect, test } from "bun:test";
import { stringifyJson } from "../../../src/dynamo/protocol/bigint-json.ts";
import { ControlHeaderError, parseAddress, parseControlHeader } from "../../../src/dynamo/request-plane/control-header.ts";
import { encodeAck, encodeFrame, FrameDecoder, FrameError, type RequestFrame } from "../../../src/dynamo/request-plane/frame-codec.ts";
import { decodeTwoPart, encodeTwoPart, TwoPartDecoder } from "../../../src/dynamo/request-plane/two-part.ts";

const MAX = 4096;
const frames: RequestFrame[] = [
  { path: "1234567890abcdef/generate", headers: { "request-id": "a", "x-frontend-send-ts-ns": "1795957482884983478" }, payload: Buffer.from("first payload") },
  { path: "e0634cbc480eab4d/é", headers: {}, payload: Buffer.alloc(0) },
  { path: "x", headers: { k: "v" }, payload: Buffer.alloc(2000, 7) },
];
const wire = Buffer.concat(frames.map(encodeFrame));
const plain = (frame: RequestFrame) => ({ ...frame, payload: frame.payload.toString("hex") });

describe("request frames", () => {
  test("the layout is u16 path, u16 headers, u32 payload, big-endian", () => {
    const bytes = encodeFrame({ path: "ab", headers: {}, payload: Buffer.from("z") });
    expect(bytes.toString("hex")).toBe("0002" + "6162" + "0002" + "7b7d" + "00000001" + "7a");
  });
  test("every chunk size gives the same frames", () => {
    for (const size of [1, 2, 3, 7, 37, 100, 1000, wire.length]) {
      const decoder = new FrameDecoder(MAX);
      const out: RequestFrame[] = [];
      for (let at = 0; at < wire.length; at += size) out.push(...decoder.push(Buffer.from(wire.subarray(at, at + size))));
      expect(out.map(plain)).toEqual(frames.map(plain));
      expect(decoder.pending).toBe(0);
    }
  });
  test("payloads stay intact after later chunks", () => {
    const decoder = new FrameDecoder(1 << 20);
    const out: RequestFrame[] = [];
    for (let i = 0; i < 50; i++) {
      const bytes = encodeFrame({ path: "p", headers: {}, payload: Buffer.alloc(5000, i) });
      for (let at = 0; at < bytes.length; at += 1024) out.push(...decoder.push(Buffer.from(bytes.subarray(at, at + 1024))));
    }
    expect(out.map((frame) => [frame.payload.length, frame.payload[0], frame.payload[4999]])).toEqual(Array.from({ length: 50 }, (_, i) => [5000, i, i]));
  });
  test("a claimed length above the limit is refused when it is read, at the length alone", () => {
    const claim = Buffer.from("0001" + "61" + "0000" + "7fffffff", "hex");
    const decoder = new FrameDecoder(MAX);
    expect(decoder.push(claim.subarray(0, claim.length - 1))).toEqual([]);
    expect(() => decoder.push(claim.subarray(claim.length - 1))).toThrow(/DYN_TCP_MAX_MESSAGE_SIZE = 4096/);
  });
  test("the limit is the whole frame: exactly at it passes, one more does not", () => {
    const fits = encodeFrame({ path: "p", headers: {}, payload: Buffer.alloc(MAX - 11) });
    expect(fits.length).toBe(MAX);
    expect(new FrameDecoder(MAX).push(fits).length).toBe(1);
    expect(() => new FrameDecoder(MAX).push(encodeFrame({ path: "p", headers: {}, payload: Buffer.alloc(MAX - 10) }))).toThrow(FrameError);
  });
  test("what is no frame is refused", () => {
    for (const hex of ["0000", "0001ff0000" + "00000000", "000161" + "0001" + "7b" + "00000000", "000161" + "0002" + "5b5d" + "00000000", "1001"])
      expect(() => new FrameDecoder(MAX).push(Buffer.from(hex, "hex"))).toThrow(FrameError);
    expect(() => new FrameDecoder(MAX).push(Buffer.from("GET / HTTP/1.1\r\n"))).toThrow(FrameError);
  });
  test("acknowledgements", () => {
    expect(encodeAck("").toString("hex")).toBe("00000000");
    expect(encodeAck("no é").toString("hex")).toBe("00000005" + "6e6f20c3a9");
  });
});

describe("two-part messages", () => {
  test("the bytes are those of the reference", () => {
    expect(encodeTwoPart(Buffer.from('{"error":null}'), null).toString("hex")).toBe("000000000000000e" + "0000000000000000".repeat(2) + "7b226572726f72223a6e756c6c7d");
    expect(encodeTwoPart(Buffer.from('"sentinel"'), null).toString("hex")).toBe("000000000000000a" + "0000000000000000".repeat(2) + "2273656e74696e656c22");
  });
  test("every chunk size gives the same messages", () => {
    const messages = [encodeTwoPart(Buffer.from('"kill"'), null), encodeTwoPart(null, Buffer.alloc(300, 1)), encodeTwoPart(Buffer.from("h"), Buffer.from("d")), encodeTwoPart(null, null)];
    const bytes = Buffer.concat(messages);
    for (let size = 1; size <= bytes.length; size += 5) {
      const decoder = new TwoPartDecoder(1000);
      const out: string[] = [];
      for (let at = 0; at < bytes.length; at += size) for (const { header, data } of decoder.push(Buffer.from(bytes.subarray(at, at + size)))) out.push(`${header.toString("hex")}|${data.toString("hex")}`);
      expect(out).toEqual(messages.map((m) => { const { header, data } = decodeTwoPart(m); return `${header.toString("hex")}|${data.toString("hex")}`; }));
    }
  });
  test("lengths that lie are refused", () => {
    const short = encodeTwoPart(Buffer.from("abc"), Buffer.from("def"));
    expect(() => decodeTwoPart(short.subarray(0, short.length - 1))).toThrow(FrameError);
    expect(() => decodeTwoPart(Buffer.concat([short, Buffer.from("x")]))).toThrow(FrameError);
    expect(() => decodeTwoPart(Buffer.alloc(23))).toThrow(FrameError);
    for (const at of [0, 4, 8, 12]) {
      const bytes = Buffer.alloc(24);
      bytes.writeUInt32BE(0xfffffff0, at);
      expect(() => new TwoPartDecoder(1000).push(bytes)).toThrow(FrameError);
    }
  });
});

describe("control header", () => {
  const header = (patch: Record<string, unknown> = {}, address = "::1:21101") =>
    Buffer.from(stringifyJson({ id: "0b3e", request_type: "single_in", payload_codec: "msgpack", connection_info: { transport: "tcp_server", info: JSON.stringify({ address, subject: "9022" }) }, ...patch }));
  test("names id, codec and target; the port stands behind the last colon", () => {
    const control = parseControlHeader(header());
    expect([control.id, control.codec.name, control.target]).toEqual(["0b3e", "msgpack", { host: "::1", port: 21101, subject: "9022" }]);
    expect(parseControlHeader(header({ payload_codec: undefined })).codec.name).toBe("json");
  });
  test("addresses", () => {
    expect(parseAddress("10.0.0.7:9345")).toEqual({ host: "10.0.0.7", port: 9345 });
    expect(parseAddress("[::1]:80")).toEqual({ host: "::1", port: 80 });
    for (const bad of ["", "host", ":80", "h:0", "h:65536", "h:1x", "h:-1"]) expect(() => parseAddress(bad)).toThrow(ControlHeaderError);
  });
  test("what it cannot serve is refused by name", () => {
    for (const [patch, name] of [[{ request_type: "many_in" }, "request_type"], [{ payload_codec: "cbor" }, "payload_codec"], [{ request_type: 2n ** 64n }, "request_type"], [{ payload_codec: [2n ** 64n] }, "payload_codec"], [{ id: 5 }, "id"], [{ connection_info: null }, "connection_info"], [{ connection_info: { transport: "udp", info: "{}" } }, "transport"]] as const)
      expect(() => parseControlHeader(header(patch))).toThrow(name);
    for (const bytes of [Buffer.from("{"), Buffer.from("[]"), Buffer.from([0xff])]) expect(() => parseControlHeader(bytes)).toThrow(ControlHeaderError);
  });
});
