// The calls of `sdks.py` with openai's client for Node: node node_calls.mjs FOLDER URL MODEL. FOLDER holds node_modules.
// It prints the results as JSON, and fails if one is not what it should be.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [folder, baseURL, model] = process.argv.slice(2);
const require = createRequire(folder + "/");
const OpenAI = require("openai").default;
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model, temperature: 0, max_tokens: 24, messages: [{ role: "user", content: "What is the capital of Norway?" }] };

const { max_tokens, temperature } = asked;
const completion = await client.completions.create({ model, prompt: "Once upon a time", max_tokens, temperature });
const chat = await client.chat.completions.create(asked);
let streamed = "", chunks = 0, usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
  chunks += 1;
}
assert.equal(streamed, chat.choices[0].message.content);
assert.deepEqual(usage.completion_tokens, chat.usage.completion_tokens);
assert.ok(chunks > 3);

const city = { type: "object", properties: { city: { enum: ["Bern", "Oslo"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters: city } }];
const called = await client.chat.completions.create({ ...asked, tools, tool_choice: "required" });
const { city: place } = JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);
assert.ok(["Bern", "Oslo"].includes(place));
const json_schema = { name: "place", schema: city, strict: true };
const parsed = await client.chat.completions.parse({ ...asked, response_format: { type: "json_schema", json_schema } });
assert.ok(["Bern", "Oslo"].includes(parsed.choices[0].message.parsed.city));
await assert.rejects(client.chat.completions.create({ ...asked, top_p: 2 }), (error) => error.status === 400 && error.param === "top_p");
const models = (await client.models.list()).data.map((each) => each.id);
assert.deepEqual(models, [model]);

console.log(JSON.stringify({
  versions: { node: process.version, openai: JSON.parse(readFileSync(folder + "/node_modules/openai/package.json")).version },
  results: {
    completion: completion.choices[0].text, chat: chat.choices[0].message.content, "streamed chunks": chunks,
    "tool call": place, parse: parsed.choices[0].message.parsed, "top_p 2": "BadRequestError", models,
  },
}));
