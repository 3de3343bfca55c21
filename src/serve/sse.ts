/** Server-sent events, dialect of OpenAI: `data: <json>\n\n` per frame, `data: [DONE]\n\n` at the end. */

const encoder = new TextEncoder();
const DONE = encoder.encode("data: [DONE]\n\n");

export interface SseOptions {
  /** The client stopped reading or left. Called at most once, never after the last frame. */
  onCancel: () => void;
  /** Turns a failure in the middle of the stream into its last frame before [DONE]; null = end the stream without a frame. */
  onError: (error: unknown) => unknown;
}

/**
 * A response that pulls its frames: nothing is produced ahead of the client, so a slow reader holds no memory here.
 * Each value of `frames` becomes one frame, as JSON.
 */
export function sseResponse(frames: AsyncGenerator<unknown, void>, options: SseOptions): Response {
  let over = false;
  const body = new ReadableStream<Uint8Array>(
    {
      async pull(controller) {
        try {
          const next = await frames.next();
          if (over) return;
          if (!next.done) {
            controller.enqueue(frame(next.value));
            return;
          }
        } catch (error) {
          if (over) return;
          const last = options.onError(error);
          if (last !== null) controller.enqueue(frame(last));
        }
        over = true;
        controller.enqueue(DONE);
        controller.close();
      },
      cancel() {
        if (over) return;
        over = true;
        options.onCancel();
        void frames.return().catch(() => {});
      },
    },
    { highWaterMark: 0 },
  );
  return new Response(body, {
    headers: { "content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no" },
  });
}

const frame = (value: unknown): Uint8Array => encoder.encode(`data: ${JSON.stringify(value)}\n\n`);
