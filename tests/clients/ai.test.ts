// The Vercel AI SDK, with the default model of its provider for OpenAI.
import assert from "node:assert";
import { openai } from "@ai-sdk/openai";
import { generateText, isStepCount, jsonSchema, Output, streamText, tool } from "ai";

const model = openai("forebay-default");

Deno.test("a text is generated and streamed", async () => {
    const { text, finishReason } = await generateText({ model, prompt: "Hello", maxOutputTokens: 8 });
    assert.equal(text.trim().split(" ").length, 8);
    assert.equal(finishReason, "length");
    let streamed = "";
    for await (const part of streamText({ model, prompt: "Hello", maxOutputTokens: 8 }).textStream) {
        streamed += part;
    }
    assert.equal(streamed.trim().split(" ").length, 8);
});

Deno.test("a tool is called and its result answered", async () => {
    const cities: string[] = [];
    const weather = tool({
        description: "Get the current weather of a city.",
        inputSchema: jsonSchema<{ city: string }>({
            type: "object",
            properties: { city: { type: "string" } },
            required: ["city"],
            additionalProperties: false,
        }),
        execute: ({ city }) => {
            cities.push(city);
            return "14 degrees";
        },
    });
    const prompt = "What is the weather in Paris?";
    const { text } = await generateText({ model, prompt, tools: { weather }, stopWhen: isStepCount(2), maxOutputTokens: 60 });
    assert.equal(cities.length, 1);
    assert(text);
});

Deno.test("an object is generated", async () => {
    const schema = jsonSchema<{ city: string }>({
        type: "object",
        properties: { city: { type: "string" } },
        required: ["city"],
        additionalProperties: false,
    });
    const { output } = await generateText({ model, prompt: "Paris", output: Output.object({ schema }) });
    assert.equal(typeof output.city, "string");
});
