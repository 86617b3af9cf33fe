// The npm package @anthropic-ai/sdk: the essentials of with_anthropic.py. OCTAVO_CLIENTS_BIN is where it is installed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { cities, maxTokens, streamed } from "./checks.mjs";

const from = (name) => process.env[`OCTAVO_CLIENTS_${name}`];
const require = createRequire(`${from("BIN")}/`);
const Anthropic = require("@anthropic-ai/sdk");

const model = from("MODEL");
const baseURL = `http://${from("HTTP")}`;
const client = new Anthropic({ baseURL, apiKey: from("KEY"), maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = {
  name: "weather",
  description: "Tells the weather of a city.",
  input_schema: {
    type: "object",
    properties: { city: { enum: ["Paris", "Rome"] } },
    required: ["city"],
    additionalProperties: false,
  },
};
const tour = { name: "tour", description: "Plans a tour of cities.", input_schema: cities };
const asked = (options) => ({ model, max_tokens: 16, messages, temperature: 0, ...options });

async function collected(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

const checks = {
  async models() {
    assert((await collected(client.models.list())).some((found) => found.id === model));
    return (await client.models.retrieve(model)).display_name;
  },
  async message_and_stream() {
    const whole = await client.messages.create(asked());
    const events = await collected(await client.messages.create(asked({ stream: true })));
    const text = events.filter((event) => event.type === "content_block_delta").map((event) => event.delta.text).join("");
    assert.equal(text, whole.content[0].text);
    assert.equal(events.at(-1).type, "message_stop");
    assert.equal(events.at(-2).usage.output_tokens, whole.usage.output_tokens);
    return `${events.length} events`;
  },
  async stream_helper() {
    let text = "";
    const final = await client.messages.stream(asked()).on("text", (delta) => (text += delta)).finalMessage();
    assert.equal(final.content[0].text, text);
    assert(final.usage.output_tokens > 0 && final.stop_reason);
    return text;
  },
  async tool_and_its_result() {
    const tools = [weather];
    const first = await client.messages.create(asked({ tools, tool_choice: { type: "tool", name: "weather" }, max_tokens: 60 }));
    const [use] = first.content;
    assert.equal(first.stop_reason, "tool_use");
    assert(["Paris", "Rome"].includes(use.input.city));
    const result = { type: "tool_result", tool_use_id: use.id, content: "no line", is_error: true };
    const turns = [...messages, { role: "assistant", content: first.content }, { role: "user", content: [result] }];
    const second = await client.messages.create(asked({ messages: turns, tools, tool_choice: { type: "none" } }));
    assert(second.content[0].text);
    return `${JSON.stringify(use.input)}, then ${JSON.stringify(second.content[0].text.slice(0, 40))}`;
  },
  async tool_streamed() {
    const parts = [];
    const choice = { type: "any", disable_parallel_tool_use: true };
    const stream = client.messages.stream(asked({ tools: [tour], tool_choice: choice, max_tokens: maxTokens }));
    const final = await stream.on("inputJson", (part) => parts.push(part)).finalMessage();
    const use = final.content.find((block) => block.type === "tool_use");
    return streamed(parts, use.input);
  },
  async count_tokens() {
    const { input_tokens } = await client.messages.countTokens({ model, messages, system: "Be brief." });
    const { usage } = await client.messages.create(asked({ system: "Be brief." }));
    assert.equal(input_tokens, usage.input_tokens + usage.cache_read_input_tokens);
    return `${input_tokens} tokens`;
  },
  async errors() {
    const stranger = new Anthropic({ baseURL, apiKey: "sk-not-one-of-them-00", maxRetries: 0 });
    const ask = (options) => client.messages.create(asked(options));
    await assert.rejects(stranger.messages.create(asked()), Anthropic.AuthenticationError);
    await assert.rejects(ask({ model: "no-such-model" }), Anthropic.NotFoundError);
    await assert.rejects(ask({ temperature: -1 }), Anthropic.BadRequestError);
    await assert.rejects(ask({ temperature: -1, stream: true }), Anthropic.BadRequestError);
    await assert.rejects(
      ask({ max_tokens: "two" }),
      (error) => error.status === 400 && error.type === "invalid_request_error" && Boolean(error.requestID),
    );
    return "5 mistakes";
  },
  async leaving_in_the_middle() {
    const stream = await client.messages.create(asked({ max_tokens: 400, stream: true, ignore_eos: true }));
    let events = 0;
    for await (const _ of stream) if (++events === 4) break;
    return `after ${events} events`;
  },
};

let failures = 0;
for (const [name, check] of Object.entries(checks)) {
  try {
    console.log(`PASS ${name}: ${String(await check()).replace(/\s+/g, " ")}`);
  } catch (error) {
    failures += 1;
    console.log(`FAIL ${name}: ${String(error.stack ?? error).replace(/\s+/g, " ").slice(0, 400)}`);
  }
}
process.exitCode = failures ? 1 : 0;
