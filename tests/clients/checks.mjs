// What a program may rely on where a tool's argument is streamed.

import assert from "node:assert/strict";

// A step brings 33 tokens at most, 32 of them guessed: a short argument may come as one part. This one has 150 or more.
const count = 72;
export const cities = {
  type: "object",
  properties: { cities: { type: "array", items: { type: "string", enum: ["Paris", "Rome"] }, minItems: count, maxItems: count } },
  required: ["cities"],
  additionalProperties: false,
};
export const maxTokens = 200;

// The parts are the argument, as it was generated: no step brings half of it, so that what does was held back.
export function streamed(parts, input) {
  const whole = parts.join("");
  assert.deepEqual(JSON.parse(whole), input);
  assert.equal(input.cities.length, count);
  const longest = Math.max(...parts.map((part) => part.length));
  assert(longest <= whole.length / 2, `${longest} of ${whole.length} characters at once, in ${parts.length} parts`);
  return `${parts.length} parts, at most ${longest} of ${whole.length} characters`;
}
