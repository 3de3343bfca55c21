import { expect } from "bun:test";
import { ModelError, openModel } from "../../src/model/model.ts";

/** Opens a model that must be refused and returns the error. */
export async function refusal(path: string): Promise<ModelError> {
  let error: unknown;
  try {
    await openModel(path);
  } catch (caught) {
    error = caught;
  }
  if (!(error instanceof ModelError)) throw new Error(`expected a ModelError for ${path}, got ${error === undefined ? "a model" : String(error)}`);
  return error;
}

/** The model must be refused with a message that names file and field and matches `words`. */
export async function expectRefusal(path: string, file: string, field: string | RegExp, words: RegExp = /./): Promise<void> {
  const error = await refusal(path);
  expect(error.file).toEndWith(file);
  if (typeof field === "string") expect(error.field).toBe(field);
  else expect(error.field).toMatch(field);
  expect(error.message).toStartWith(error.file);
  expect(error.message).toMatch(words);
  expect(error.message.length).toBeLessThan(600);
  expect(error.message).not.toContain("\n");
}
