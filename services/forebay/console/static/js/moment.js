/**
 * The route and the chosen moment, both kept in the fragment of the address, so that a link shows the same page.
 *
 * The fragment is `#/VIEW/ARGUMENT?PARAMETERS`, with the moment as parameter `at`, in microseconds of Unix time. It is
 * absent for the live state.
 */

/**
 * Remove the token from the fragment and return it.
 * Returns null if the fragment has none
 */
export function takeToken() {
  const fragment = location.hash.slice(1);
  const [path, query] = fragment.startsWith("/") ? split(fragment) : ["", fragment];
  const params = new URLSearchParams(query);
  const token = params.get("token");
  if (token === null) return null;
  params.delete("token");
  history.replaceState(null, "", `#${path}${params.size ? `?${params}` : ""}`);
  return token;
}

/** The chosen moment. Listeners are called after each change of the moment or the route. */
export class Moment {
  #listeners = new Set();

  constructor() {
    addEventListener("hashchange", () => this.#notify());
  }

  /** Returns the moment in microseconds of Unix time; null for the live state */
  get atUs() {
    const at = new URLSearchParams(split(location.hash.slice(1))[1]).get("at");
    return at !== null && /^\d{1,16}$/.test(at) ? Number(at) : null;
  }

  /**
   * @returns {{ view: string, argument: string, params: Record<string, string> }} the name of the view, for example
   *   `requests`, the part after it, for example the number of a request, and parameters other than the moment
   */
  get route() {
    const [path, query] = split(location.hash.slice(1));
    const [, view = "", ...rest] = path.split("/");
    const params = Object.fromEntries(new URLSearchParams(query));
    delete params.at;
    return { view: view || "fleet", argument: decoded(rest.join("/")), params };
  }

  /** atUs: null for the live state */
  set(/** @type {number | null} */ atUs, { isNew = false } = {}) {
    if (atUs === this.atUs) return;
    const { view, argument, params } = this.route;
    this.#go(linkTo(view, argument, params, atUs === null ? null : Math.round(atUs)), isNew);
  }

  live() {
    this.set(null, { isNew: true });
  }

  navigate(view, argument = "", params = {}, { isNew = true } = {}) {
    this.#go(linkTo(view, argument, params, this.atUs), isNew);
  }

  /**
   * Call a function after each change of the moment or the route.
   * Returns removes the listener
   */
  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #go(fragment, isNew) {
    if (fragment === location.hash) return;
    history[isNew ? "pushState" : "replaceState"](null, "", fragment);
    this.#notify();
  }

  #notify() {
    for (const listener of [...this.#listeners]) listener();
  }
}

/**
 * Return the fragment of a page, for the `href` of a link.
 * params: null, undefined and "" are left out
 */
export function linkTo(view, /** @type {string | number} */ argument = "", params = {}, /** @type {number | null} */ atUs = null) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  }
  if (atUs !== null) query.set("at", String(atUs));
  const path = argument === "" ? view : `${view}/${encodeURIComponent(argument)}`;
  return `#/${path}${query.size ? `?${query}` : ""}`;
}

function split(fragment) {
  const at = fragment.indexOf("?");
  return at < 0 ? [fragment, ""] : [fragment.slice(0, at), fragment.slice(at + 1)];
}

function decoded(component) {
  try {
    return decodeURIComponent(component);
  } catch {
    return component; // a link that somebody typed
  }
}
