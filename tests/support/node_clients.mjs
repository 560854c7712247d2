// The npm clients of OpenAI and Anthropic: reads {"root", "calls": [[api, body], ...]}, and writes for each call the
// whole answer, the types of a stream's events, and the answer that the client makes of them.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const load = createRequire(`${process.argv[2]}/`);
const { root, calls } = JSON.parse(readFileSync(0));
const openai = new (load("openai").OpenAI)({ baseURL: `${root}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new (load("@anthropic-ai/sdk").Anthropic)({ baseURL: root, apiKey: "none", maxRetries: 0 });
const apis = { "chat/completions": openai.chat.completions, responses: openai.responses, messages: anthropic.messages };
const answers = [];
for (const [api, body] of calls) {
  try {
    const whole = await apis[api].create(body), stream = apis[api].stream(body), kinds = [];
    for await (const event of stream) kinds.push(event.type ?? event.object);
    const final = stream.finalResponse ?? stream.finalMessage;
    answers.push({ whole, kinds, final: await (stream.finalChatCompletion ?? final).call(stream) });
  } catch (error) {
    answers.push({ kind: error.constructor.name, status: error.status, message: error.message });
  }
}
const { id } = await openai.responses.create({ input: "hello", max_output_tokens: 3 });
const kept = await openai.responses.retrieve(id);
await openai.responses.delete(id);
const messages = [{ role: "user", content: "hello" }];
const { input_tokens } = await anthropic.messages.countTokens({ model: "tiny", messages });
console.log(JSON.stringify({ answers, kept: kept.id === id, input_tokens }));
