// The npm package openai: the same essentials as with_openai.py. OCTAVO_CLIENTS_BIN is where it is installed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";

const from = (name) => process.env[`OCTAVO_CLIENTS_${name}`];
const require = createRequire(`${from("BIN")}/`);
const OpenAI = require("openai");

const model = from("MODEL");
const baseURL = `http://${from("HTTP")}/v1`;
const client = new OpenAI({ baseURL, apiKey: from("KEY"), maxRetries: 0 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const weather = {
  type: "function",
  function: {
    name: "weather",
    description: "Tells the weather of a city.",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Paris", "Rome"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const schema = {
  type: "object",
  properties: { capital: { type: "string", maxLength: 20 } },
  required: ["capital"],
  additionalProperties: false,
};

async function collected(stream) {
  const items = [];
  for await (const item of stream) items.push(item);
  return items;
}

const textOf = (chunks) => chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.delta.content ?? "").join("");

const checks = {
  async models() {
    assert((await collected(client.models.list())).some((found) => found.id === model));
    return (await client.models.retrieve(model)).id;
  },
  async chat_and_stream() {
    const asked = { model, messages, max_tokens: 16, temperature: 0 };
    const whole = await client.chat.completions.create(asked);
    const chunks = await collected(
      await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } }),
    );
    assert.equal(textOf(chunks), whole.choices[0].message.content);
    assert.equal(chunks.at(-1).usage.total_tokens, whole.usage.total_tokens);
    return `${chunks.length} chunks`;
  },
  async stream_helper() {
    const runner = client.chat.completions.stream({ model, messages, max_tokens: 8 });
    let text = "";
    runner.on("content", (delta) => (text += delta));
    assert.equal(await runner.finalContent(), text);
    return JSON.stringify(text);
  },
  async two_choices() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 8, n: 2, seed: 5, temperature: 1 });
    const texts = whole.choices.map((choice) => choice.message.content);
    assert.equal(texts.length, 2);
    assert.notEqual(texts[0], texts[1]);
    return JSON.stringify(texts);
  },
  async logprobs() {
    const whole = await client.chat.completions.create({ model, messages, max_tokens: 4, logprobs: true, top_logprobs: 2 });
    const content = whole.choices[0].logprobs.content;
    assert(content.every((token) => token.logprob <= 0 && token.top_logprobs.length === 2));
    return `${content.length} tokens`;
  },
  async completions() {
    const asked = { model, prompt: "The capital of France is", max_tokens: 8, temperature: 0 };
    const whole = await client.completions.create(asked);
    const chunks = await collected(await client.completions.create({ ...asked, stream: true }));
    assert.equal(chunks.flatMap((chunk) => chunk.choices).map((choice) => choice.text).join(""), whole.choices[0].text);
    return JSON.stringify(whole.choices[0].text);
  },
  async responses_and_stream() {
    const asked = { model, input: "Say hello.", max_output_tokens: 12, temperature: 0 };
    const whole = await client.responses.create(asked);
    const events = await collected(await client.responses.create({ ...asked, stream: true }));
    const said = events.filter((event) => event.type === "response.output_text.delta").map((event) => event.delta);
    assert.equal(said.join(""), whole.output_text);
    assert.equal(events[0].type, "response.created");
    assert.equal(events.at(-1).type, `response.${whole.status}`);
    return `${whole.status}, ${events.length} events`;
  },
  async responses_stream_helper() {
    const final = await client.responses.stream({ model, input: "Say hello.", max_output_tokens: 12 }).finalResponse();
    assert(final.output_text);
    return JSON.stringify(final.output_text);
  },
  async tools_round_trip() {
    const asked = { model, tools: [weather], max_tokens: 60, parallel_tool_calls: false };
    const first = (await client.chat.completions.create({ ...asked, messages, tool_choice: "required" })).choices[0];
    assert.equal(first.finish_reason, "tool_calls");
    const [call] = first.message.tool_calls;
    assert.equal(call.function.name, "weather");
    assert(["Paris", "Rome"].includes(JSON.parse(call.function.arguments).city));
    const result = { role: "tool", tool_call_id: call.id, content: "sunny" };
    const second = await client.chat.completions.create({
      ...asked,
      messages: [...messages, first.message, result],
      tool_choice: "none",
    });
    assert(second.choices[0].message.content);
    return call.function.arguments;
  },
  async tools_streamed() {
    const tool_choice = { type: "function", function: { name: "weather" } };
    const runner = client.chat.completions.stream({ model, messages, tools: [weather], tool_choice, max_tokens: 60 });
    const { choices } = await runner.finalChatCompletion();
    assert.equal(choices[0].finish_reason, "tool_calls");
    assert(JSON.parse(choices[0].message.tool_calls[0].function.arguments).city);
    return choices[0].message.tool_calls[0].function.arguments;
  },
  async json_schema() {
    const response_format = { type: "json_schema", json_schema: { name: "c", schema, strict: true } };
    const whole = await client.chat.completions.parse({ model, messages, response_format, max_tokens: 60 });
    assert.deepEqual(Object.keys(JSON.parse(whole.choices[0].message.content)), ["capital"]);
    return whole.choices[0].message.content;
  },
  async errors() {
    const stranger = new OpenAI({ baseURL, apiKey: "sk-not-one-of-them-00", maxRetries: 0 });
    const ask = (options) => client.chat.completions.create({ model, messages, ...options });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
    await assert.rejects(ask({ model: "no-such-model" }), OpenAI.NotFoundError);
    await assert.rejects(ask({ temperature: -1 }), OpenAI.BadRequestError);
    await assert.rejects(ask({ temperature: -1, stream: true }), OpenAI.BadRequestError);
    await assert.rejects(ask({ n: "two" }), (error) => error.status === 400 && error.param === "n" && Boolean(error.requestID));
    return "5 mistakes";
  },
  async leaving_in_the_middle() {
    const controller = new AbortController();
    const stream = await client.chat.completions.create(
      { model, messages, max_tokens: 400, stream: true, ignore_eos: true },
      { signal: controller.signal },
    );
    let chunks = 0;
    for await (const _ of stream) if (++chunks === 3) break;
    controller.abort();
    return `after ${chunks} chunks`;
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
