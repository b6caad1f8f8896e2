// The official `openai` client for Node, which takes the address and the key from the environment.
import assert from "node:assert";
import OpenAI from "openai";

const model = "forebay-default";
const client = new OpenAI({ maxRetries: 0 });

Deno.test("a chat is streamed", async () => {
    const messages = [{ role: "user" as const, content: "Hello" }];
    let text = "";
    for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true })) {
        text += chunk.choices[0].delta.content ?? "";
    }
    assert.equal(text.trim().split(" ").length, 8);
});
