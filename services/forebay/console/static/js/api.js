/** Requests to the console's HTTP endpoints. */

const TOKEN_KEY = "forebay-console-token";
const RETRY_MIN_MS = 500;
const RETRY_MAX_MS = 10_000; // a console that was started again is found within this time
const BUFFER_MAX = 1_000_000; // characters; an event of the console has a few hundred
const SILENCE_MAX_MS = 15_000; // the server sends an event at least every 5 s

/** An error reply of the console, or no reply. */
export class ApiError extends Error {
  /** status: HTTP status; 0 if the console cannot be reached */
  constructor(message, status, code = "") {
    super(message);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

/** Return whether an error means only that the page no longer needs the reply. */
export function isAbort(error) {
  return error instanceof DOMException && error.name === "AbortError";
}

export class Api {
  #onUnauthorized;

  /** onUnauthorized: called if the console rejects the token, or needs one */
  constructor(onUnauthorized) {
    this.#onUnauthorized = onUnauthorized;
  }

  setToken(token) {
    sessionStorage.setItem(TOKEN_KEY, token);
  }

  /**
   * Get JSON. Throws ApiError, or an abort error.
   * @template {keyof Server.Responses} P
   * @param {P} path for example `v1/console/fleet`
   * @param {object} params query, in which an array repeats its name; null, undefined and "" are left out
   * @param {AbortSignal} [signal]
   * @returns {Promise<Server.Responses[P]>}
   */
  async get(path, params = {}, signal) {
    return (await this.#fetch(path, params, { signal })).json();
  }

  async post(path, body, headers = {}) {
    const init = { method: "POST", body: JSON.stringify(body) };
    return (await this.#fetch(path, {}, init, { "content-type": "application/json", ...headers })).json();
  }

  async remove(path) {
    await this.#fetch(path, {}, { method: "DELETE" });
  }

  /**
   * Follow the state of the catalog until `signal` is aborted. Connects again after each loss.
   * onState: receives a CatalogState at most four times per second
   */
  async events(/** @type {(state: Server.CatalogState) => void} */ onState, onConnection, /** @type {AbortSignal} */ signal) {
    let wait = RETRY_MIN_MS;
    while (!signal.aborted) {
      const silence = new AbortController();
      const both = AbortSignal.any([signal, silence.signal]);
      let timer = setTimeout(() => silence.abort(), SILENCE_MAX_MS);
      try {
        const response = await this.#fetch("v1/console/events", {}, { signal: both });
        await readEvents(response, (data) => {
          clearTimeout(timer);
          timer = setTimeout(() => silence.abort(), SILENCE_MAX_MS);
          wait = RETRY_MIN_MS;
          onConnection(true);
          if (data) onState(JSON.parse(data));
        });
      } catch (error) {
        if (error instanceof ApiError && error.status === 401) return;
        if (!isAbort(error) && !(error instanceof ApiError) && !(error instanceof TypeError)) throw error;
      } finally {
        clearTimeout(timer);
      }
      if (signal.aborted) return;
      onConnection(false);
      await new Promise((done) => setTimeout(done, wait));
      wait = Math.min(2 * wait, RETRY_MAX_MS);
    }
  }

  async #fetch(path, params, init, headers = {}) {
    const url = new URL(path, document.baseURI);
    for (const [name, value] of Object.entries(params)) {
      for (const one of [value].flat()) {
        if (one !== null && one !== undefined && one !== "") url.searchParams.append(name, String(one));
      }
    }
    const token = sessionStorage.getItem(TOKEN_KEY);
    const authorization = token ? { authorization: `Bearer ${token}` } : {};
    let response;
    try {
      response = await fetch(url, { ...init, headers: { ...authorization, ...headers }, cache: "no-store" });
    } catch (error) {
      if (isAbort(error)) throw error;
      throw new ApiError("the console cannot be reached; is `forebay console` still running?", 0);
    }
    if (response.ok) return response;
    if (response.status === 401) this.#onUnauthorized(token !== null);
    throw await errorOf(response);
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `the console replied with HTTP status ${response.status}`;
  return new ApiError(message, response.status, body?.error?.code ?? "");
}

/** Read events until the response ends. `EventSource` cannot send the header with the token. */
async function readEvents(response, onEvent) {
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
    for (const event of events) onEvent(event.match(/^data: (.*)$/m)?.[1]);
  }
}
