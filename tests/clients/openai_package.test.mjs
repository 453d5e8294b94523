// The official `openai` package for Node. LILY_URL has the demonstration model, SCRIPTED_URL the model of conftest.py's `scripted`.

import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";

const client = (url) => new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const lily = client(process.env.LILY_URL);
const scripted = client(process.env.SCRIPTED_URL);

const parameters = {
  type: "object",
  properties: { city: { type: "string" }, days: { type: "integer" } },
  required: ["city"],
};
const question = "What is the weather in Brno?";

test("a streamed chat adds up to the plain one", async () => {
  const asked = { model: "lily", messages: [{ role: "user", content: "Hello, who are you?" }], seed: 7 };
  const plain = await lily.chat.completions.create(asked);
  const { content, reasoning_content } = plain.choices[0].message;
  const sum = { content: "", reasoning_content: "" };
  let chunks = 0;
  let usage;
  const stream = await lily.chat.completions.create({
    ...asked, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    chunks += 1;
    usage = chunk.usage;
    for (const field of Object.keys(sum)) sum[field] += chunk.choices[0]?.delta[field] ?? "";
  }
  assert.ok(content && reasoning_content && chunks > 3);
  assert.deepEqual(sum, { content, reasoning_content });
  assert.equal(usage.completion_tokens, plain.usage.completion_tokens);
});

test("the package runs a tool and gives its result back", async () => {
  const calls = [];
  const runner = scripted.chat.completions.runTools({
    model: "lily",
    stream: true,
    messages: [{ role: "user", content: question }],
    tools: [
      {
        type: "function",
        function: {
          name: "get_weather",
          description: "The weather in a city.",
          parameters,
          parse: JSON.parse,
          function: (given) => (calls.push(given), "sunny"),
        },
      },
    ],
  });
  assert.equal(await runner.finalContent(), "It is sunny in Brno.");
  assert.deepEqual(calls, [{ city: "Brno", days: 3 }]);
});

test("a stream of the responses API", async () => {
  const tools = [{ type: "function", name: "get_weather", parameters, strict: false }];
  const stream = scripted.responses.stream({ model: "lily", input: question, tools });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(events.map((event) => event.sequence_number), [...events.keys()]);
  assert.equal(events[0].type, "response.created");
  assert.equal(events.at(-1).type, "response.completed");
  const [thought, call] = (await stream.finalResponse()).output;
  assert.equal(thought.content[0].text, "I need the weather.");
  assert.deepEqual(JSON.parse(call.arguments), { city: "Brno", days: 3 });
  const told = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
  const input = [{ role: "user", content: question }, thought, call, told];
  const last = await scripted.responses.create({ model: "lily", input, tools });
  assert.equal(last.output_text, "It is sunny in Brno.");
});

test("an error is the package's own", async () => {
  await assert.rejects(lily.chat.completions.create({ model: "lily", messages: [] }), OpenAI.BadRequestError);
});
