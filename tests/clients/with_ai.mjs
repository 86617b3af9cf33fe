// The `ai` SDK by its providers openai-compatible and openai: text, streams, objects, tools in steps, usage, errors.
// OCTAVO_CLIENTS_BIN is where it is installed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { cities, maxTokens, streamed } from "./checks.mjs";

const from = (name) => process.env[`OCTAVO_CLIENTS_${name}`];
const require = createRequire(`${from("BIN")}/`);
const load = (name) => import(pathToFileURL(require.resolve(name)));
const { APICallError, Output, generateText, jsonSchema, stepCountIs, streamText, tool } = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");

const place = { baseURL: `http://${from("HTTP")}/v1`, apiKey: from("KEY") };
const compatible = (options) =>
  createOpenAICompatible({ name: "octavo", supportsStructuredOutputs: true, includeUsage: true, ...place, ...options });
let sent = "";
const openai = createOpenAI({ ...place, fetch: (url, options) => fetch(url, ((sent = options.body), options)) });
const models = {
  compatible: compatible().chatModel(from("MODEL")),
  chat: openai.chat(from("MODEL")),
  responses: openai.responses(from("MODEL")),
};
const completion = compatible().completionModel(from("MODEL"));
const settings = { temperature: 0, maxOutputTokens: 60, maxRetries: 0 };
const prompt = "What is the capital of France?";
const capital = jsonSchema({
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, large: { type: "boolean" } },
  required: ["name", "large"],
  additionalProperties: false,
});
const called = [];
const weather = tool({
  description: "Tells the weather of a city.",
  inputSchema: jsonSchema({
    type: "object",
    properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  }),
  execute: async ({ city }) => {
    called.push(city);
    return `sunny in ${city}`;
  },
});
const tour = tool({ description: "Plans a tour of cities.", inputSchema: jsonSchema(cities) });

// What a check finds with each of the providers, side by side.
async function each(check) {
  const found = [];
  for (const [name, model] of Object.entries(models)) found.push(`${name}: ${await check(model)}`);
  return found.join("; ");
}

async function collected(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

function addsUp(usage) {
  assert(usage.inputTokens > 0 && usage.outputTokens > 0, JSON.stringify(usage));
  assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
}

const checks = {
  async text() {
    return each(async (model) => {
      const result = await generateText({ model, prompt, ...settings });
      assert(result.text);
      assert.equal(result.finishReason, "stop");
      addsUp(result.usage);
      return result.text;
    });
  },
  async stream() {
    return each(async (model) => {
      const result = streamText({ model, prompt, ...settings });
      const pieces = await collected(result.textStream);
      assert(pieces.length > 2);
      assert.equal(pieces.join(""), (await generateText({ model, prompt, ...settings })).text);
      addsUp(await result.usage);
      return `${pieces.length} pieces`;
    });
  },
  async object() {
    return each(async (model) => {
      const result = await generateText({ model, prompt, output: Output.object({ schema: capital }), ...settings });
      assert.deepEqual(Object.keys(result.output).sort(), ["large", "name"]);
      return JSON.stringify(result.output);
    });
  },
  async object_in_parts() {
    return each(async (model) => {
      const result = streamText({ model, prompt, output: Output.object({ schema: capital }), ...settings });
      const parts = await collected(result.partialOutputStream);
      assert(parts.length > 1);
      assert.deepEqual(Object.keys(parts.at(-1)).sort(), ["large", "name"]);
      return `${parts.length} parts`;
    });
  },
  async tool_in_steps() {
    return each(async (model) => {
      const toolChoice = { type: "tool", toolName: "weather" };
      const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? toolChoice : "none" });
      const result = await generateText({ model, prompt, tools: { weather }, stopWhen: stepCountIs(2), prepareStep, ...settings });
      assert.equal(result.steps.length, 2);
      const [first] = result.steps;
      assert.equal(first.finishReason, "tool-calls");
      assert(["Paris", "Rome"].includes(first.toolCalls[0].input.city));
      assert.equal(first.toolResults[0].output, `sunny in ${called.at(-1)}`);
      assert(result.text);
      return `${called.at(-1)}, then ${JSON.stringify(result.text.slice(0, 30))}`;
    });
  },
  async tool_streamed() {
    return each(async (model) => {
      const toolChoice = { type: "tool", toolName: "tour" };
      const result = streamText({ model, prompt, tools: { tour }, toolChoice, ...settings, maxOutputTokens: maxTokens });
      const parts = await collected(result.fullStream);
      const input = parts.filter((part) => part.type === "tool-input-delta").map((part) => part.delta);
      const [call] = await result.toolCalls;
      return streamed(input, call.input);
    });
  },
  // What was said goes back, to Responses by the ids of items that are stored there.
  async second_turn() {
    return each(async (model) => {
      const first = await generateText({ model, prompt, ...settings });
      const asked = [{ role: "user", content: prompt }];
      const second = await generateText({ model, messages: [...asked, ...first.response.messages, ...asked], ...settings });
      assert(second.text);
      const named = model !== models.compatible && sent.includes("item_reference");
      const fresh = await generateText({ model, messages: asked, ...settings });
      assert(second.usage.inputTokens > fresh.usage.inputTokens + 5);
      assert.equal(named, model === models.responses);
      return `${second.usage.inputTokens} tokens`;
    });
  },
  async completion() {
    const result = await generateText({ model: completion, prompt: "One, two, three,", ...settings, maxOutputTokens: 8 });
    assert(result.text);
    assert.equal(result.finishReason, "length");
    addsUp(result.usage);
    return JSON.stringify(result.text);
  },
  async errors() {
    const stranger = compatible({ apiKey: "sk-not-one-of-them-00" }).chatModel(from("MODEL"));
    const nobody = compatible().chatModel("no-such-model");
    const status = (code) => (error) => APICallError.isInstance(error) && error.statusCode === code;
    await assert.rejects(generateText({ model: stranger, prompt, ...settings }), status(401));
    await assert.rejects(generateText({ model: nobody, prompt, ...settings }), status(404));
    await assert.rejects(generateText({ model: models.compatible, prompt, ...settings, temperature: -1 }), status(400));
    return "3 mistakes";
  },
};

let failures = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    console.log(`PASS ${name}: ${String(await check()).replace(/\s+/g, " ").slice(0, 400)}`);
  } catch (error) {
    failures += 1;
    console.log(`FAIL ${name}: ${String(error.stack ?? error).replace(/\s+/g, " ").slice(0, 400)}`);
  }
}
process.exitCode = failures ? 1 : 0;
