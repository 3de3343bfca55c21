import { open } from "node:fs/promises";
import { createBLAKE3 } from "hash-wasm";

/** A file as a model card names it. */
export interface CheckedFile {
  /** A path, or the URL the frontend fetches it from. */
  path: string;
  checksum: `blake3:${string}`;
  /** Bytes. */
  size: number;
}

/** BLAKE3 of a file, read in pieces. @throws Error of the file system */
export async function checkFile(path: string): Promise<CheckedFile> {
  const hasher = (await createBLAKE3()).init();
  const file = await open(path, "r");
  let size = 0;
  try {
    const piece = Buffer.allocUnsafe(1 << 20);
    for (;;) {
      const { bytesRead } = await file.read(piece, 0, piece.length, null);
      if (bytesRead === 0) break;
      size += bytesRead;
      hasher.update(piece.subarray(0, bytesRead));
    }
  } finally {
    await file.close();
  }
  return { path, checksum: `blake3:${hasher.digest("hex")}`, size };
}
