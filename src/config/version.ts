import packageJson from "../../package.json" with { type: "json" };

declare const LAYERSCALE_COMMIT: string | undefined;

/** Version of package.json and the commit the build was made from ("unknown" outside a build). */
export const VERSION: string = packageJson.version;
export const COMMIT: string = typeof LAYERSCALE_COMMIT === "string" ? LAYERSCALE_COMMIT : "unknown";
