// The official `@anthropic-ai/sdk` client, which takes the address and the key from the environment.
import assert from "node:assert";
import Anthropic from "@anthropic-ai/sdk";

const model = "forebay-default";
const client = new Anthropic({ maxRetries: 0 });
const messages = [{ role: "user" as const, content: "Hello" }];

Deno.test("a message is created and streamed", async () => {
    const message = await client.messages.create({ model, messages, max_tokens: 8 });
    assert.equal(message.stop_reason, "max_tokens");
    const stream = client.messages.stream({ model, messages, max_tokens: 8 });
    let text = "";
    stream.on("text", (delta) => text += delta);
    const final = await stream.finalMessage();
    assert.deepEqual(final.content, [{ type: "text", text }]);
    assert.equal(final.usage.output_tokens, 8);
});

Deno.test("tokens are counted", async () => {
    assert((await client.messages.countTokens({ model, messages })).input_tokens > 8);
});
