/** Server-sent events, read with `fetch`, because `EventSource` cannot send the header with the token. */

const BUFFER_MAX = 1_000_000; // characters; an event of the console has a few hundred

/** Read events until the response ends. */
export async function readEvents(response, onEvent) {
  if (!response.body) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer = (buffer + value).replaceAll("\r\n", "\n");
    const events = buffer.split("\n\n");
    buffer = events.pop() ?? "";
    if (buffer.length > BUFFER_MAX) throw new TypeError("an event of the console is too long");
    for (const event of events) dispatch(event, onEvent);
  }
}

function dispatch(event, onEvent) {
  let name = "message";
  const data = [];
  for (const line of event.split("\n")) {
    const [, field, value] = line.match(/^([^:]*):? ?(.*)$/s) ?? [];
    if (field === "event") name = value;
    else if (field === "data") data.push(value);
  }
  if (data.length) onEvent(name, data.join("\n"));
}
