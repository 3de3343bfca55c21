/** Imported `with { type: "file" }`: the path of the file. */
declare module "*.so" {
  const path: string;
  export default path;
}
