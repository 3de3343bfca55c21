import { describe, expect, test } from "bun:test";
import { dockerfile, lintDockerfile, parseDockerfile } from "../../../scripts/lib/image.mjs";

describe("the Dockerfile and the script that assembles its tree", () => {
  const source = dockerfile();
  test("are in step", () => expect(lintDockerfile(source)).toEqual([]));

  const changes: [string, string | RegExp, string][] = [
    ["another base", "FROM scratch", "FROM debian:bookworm-slim"],
    ["a file that the script does not copy", "WORKDIR /\nEXPOSE", "COPY extra /extra\nWORKDIR /\nEXPOSE"],
    ["no tree", "COPY --from=build /rootfs/ /\n", ""],
    ["another host", "LAYERSCALE_HOST=0.0.0.0", "LAYERSCALE_HOST=127.0.0.1"],
    ["no host", "ENV LAYERSCALE_HOST=0.0.0.0\n", ""],
    ["another variable", "STOPSIGNAL", "ENV DYN_NAMESPACE=x\nSTOPSIGNAL"],
    ["another entrypoint", '["/app/layerscale-loader"]', '["/app/layerscale"]'],
    ["an entrypoint through a shell", '["/app/layerscale-loader"]', "/app/layerscale-loader"],
    ["arguments", /$/, 'CMD ["dynamo"]\n'],
    ["a user", "STOPSIGNAL", "USER 10001\nSTOPSIGNAL"],
    ["another stop signal", "STOPSIGNAL SIGTERM", "STOPSIGNAL SIGKILL"],
    ["a tree made otherwise", "RUN node scripts/image.mjs --into /rootfs", "RUN cp -a dist /rootfs"],
    ["no CUDA library", 'ARG TASKS="all cuda"', "ARG TASKS=all"],
    ["no pip for the CUDA compiler", " python3-pip", ""],
    ["a step in the last stage", "STOPSIGNAL", "RUN true\nSTOPSIGNAL"],
  ];
  for (const [name, from, to] of changes)
    test(`differ: ${name}`, () => {
      const changed = source.replace(from, to);
      expect(changed).not.toBe(source);
      expect(lintDockerfile(changed).length).toBeGreaterThan(0);
    });

  test("comments, continued lines and spaces do not matter", () => {
    expect(lintDockerfile(source.replace("ENV LAYERSCALE_HOST", "# a comment\nENV \\\n  LAYERSCALE_HOST").replace("FROM scratch", "from  scratch"))).toEqual([]);
    expect(parseDockerfile("FROM a AS b\nRUN x \\\n  && y\n")).toEqual([["b", "FROM", "a AS b"], ["b", "RUN", "x && y"]]);
  });
});
