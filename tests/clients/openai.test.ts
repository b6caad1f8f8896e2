// The official `openai` client for Node, which takes the address and the key from the environment.
import assert from "node:assert";
import OpenAI from "openai";

const model = "forebay-default";
const client = new OpenAI({ maxRetries: 0 });

function words(text: string): number {
    return text.trim().split(" ").length;
}

Deno.test("a chat is streamed", async () => {
    const messages = [{ role: "user" as const, content: "Hello" }];
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true })) {
        text += chunk.choices[0].delta.content ?? "";
    }
    assert.equal(words(text), 8);
});

Deno.test("a response is created, streamed and parsed", async () => {
    const response = await client.responses.create({ model, input: "Hello", max_output_tokens: 8 });
    assert.equal(words(response.output_text), 8);
    const stream = client.responses.stream({ model, input: "Hello", max_output_tokens: 8 });
    let text = "";
    for await (const event of stream) {
        if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal((await stream.finalResponse()).output_text, text);
    const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
    const format = { type: "json_schema" as const, name: "city", schema };
    const parsed = await client.responses.parse({ model, input: "Paris", text: { format } });
    assert.equal(typeof (parsed.output_parsed as unknown as { city: string }).city, "string");
});

Deno.test("a background response is retrieved, streamed, cancelled and deleted", async () => {
    const input = "Hello";
    const { id } = await client.responses.create({ model, input, background: true, max_output_tokens: 20 });
    const events = [];
    for await (const event of await client.responses.retrieve(id, { stream: true })) events.push(event);
    const rest = [];
    const starting_after = events[5].sequence_number;
    for await (const event of await client.responses.retrieve(id, { stream: true, starting_after })) rest.push(event);
    assert.deepEqual(rest, events.slice(6));
    assert.equal(words((await client.responses.retrieve(id)).output_text), 20);
    await client.responses.delete(id);
    await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
    const long = await client.responses.create({ model, input, background: true, max_output_tokens: 30_000 });
    assert.equal((await client.responses.cancel(long.id)).status, "cancelled");
});
