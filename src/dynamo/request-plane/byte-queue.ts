/**
 * Bytes that arrived and are not used yet, as one contiguous view. Memory follows what arrived, never what a peer announced.
 * Views stay valid: nothing is overwritten in place.
 */
export class ByteQueue {
  #buffer: Buffer = Buffer.alloc(0);
  #start = 0;
  #end = 0;
  /** The buffer is this queue's own and has room behind #end; a borrowed chunk has none. */
  #owned = false;

  get length(): number {
    return this.#end - this.#start;
  }

  /** The chunk must not change afterwards. */
  append(chunk: Uint8Array): void {
    if (chunk.length === 0) return;
    if (this.length === 0) {
      this.#buffer = Buffer.from(chunk.buffer, chunk.byteOffset, chunk.length);
      this.#start = 0;
      this.#end = chunk.length;
      this.#owned = false;
      return;
    }
    const need = this.length + chunk.length;
    if (!this.#owned || this.#end + chunk.length > this.#buffer.length) {
      const next = Buffer.allocUnsafe(Math.max(1024, need * 2));
      this.#buffer.copy(next, 0, this.#start, this.#end);
      this.#buffer = next;
      this.#end = this.length;
      this.#start = 0;
      this.#owned = true;
    }
    this.#buffer.set(chunk, this.#end);
    this.#end += chunk.length;
  }

  /** The bytes from the front on; nothing is consumed. */
  peek(): Buffer {
    return this.#buffer.subarray(this.#start, this.#end);
  }

  consume(bytes: number): void {
    if (bytes > this.length) throw new RangeError(`consume ${bytes} of ${this.length} bytes`);
    this.#start += bytes;
  }
}
