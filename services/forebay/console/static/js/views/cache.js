/**
 * The tree of hot prompt prefixes at the chosen moment, with the worker ranks that cache them.
 *
 * @module views/cache
 */

import { h, put, reconcile, replace, setText } from "../dom.js";
import { counted, whole } from "../format.js";
import { linkTo } from "../moment.js";
import { emptyBox } from "../parts.js";
import { createNode, keyOf, updateNode } from "./cache_node.js";

const READ_EVERY_MS = 5_000; // the console derives the tree anew each time, which takes up to seconds
const LIMIT = 300; // nodes
const NOTHING = { requests: 0, is_complete: true, short: 0, blocks: 0, matched: 0, matches: [], roots: [], omitted_roots: 0 };

/**
 * Create the view.
 *
 * @param {import("../views.js").Context} context
 * @returns {import("../views.js").View}
 */
export function create(context) {
  return new CacheView(context);
}

class CacheView {
  /** @type {HTMLElement} */ element;
  /** @type {import("../views.js").Context} */ #context;
  #query = h("input", { type: "search", name: "query", autocomplete: "off", spellcheck: "false" });
  #field = h(
    "select",
    { name: "field", "aria-label": "Search in" },
    h("option", { value: "text" }, "prompt text"),
    h("option", { value: "id" }, "request ID"),
  );
  #summary = h("p", { class: "soft" }, "Deriving the tree…");
  #matches = h("div", { "aria-live": "polite" });
  #roots = h("div", { class: "cache-roots" });
  #shown = "";
  #readMs = -Infinity;

  /** @param {import("../views.js").Context} context */
  constructor(context) {
    this.#context = context;
    this.#showQuery();
    const onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#search();
    };
    this.element = h(
      "div",
      { class: "view cache-view" },
      h("h1", {}, "Cache"),
      h(
        "form",
        { class: "filters", role: "search", "aria-label": "Search prefixes", onsubmit },
        h("label", {}, "Find ", this.#query),
        h("label", {}, "in ", this.#field),
        h("button", { type: "submit", class: "button" }, "Search"),
      ),
      this.#summary,
      this.#matches,
      this.#roots,
    );
  }

  /** @param {AbortSignal} signal */
  async refresh(signal) {
    const { api, moment, state } = this.#context;
    const { atUs, route } = moment;
    const { text = "", id = "" } = route.params;
    const wanted = JSON.stringify([atUs, text, id]);
    const isDue = atUs === null && performance.now() - this.#readMs >= READ_EVERY_MS;
    if (wanted === this.#shown && !isDue) return;
    if (wanted !== this.#shown) this.#showQuery();
    const params = { at_us: atUs, text: id ? "" : text, request_id: id, limit: LIMIT };
    const hasDecisions = /** @type {any} */ (state()).end_us > 0;
    const tree = hasDecisions ? await api.get("v1/console/cache", params, signal) : NOTHING;
    const isNewSearch = wanted !== this.#shown;
    this.#shown = wanted;
    this.#readMs = performance.now();
    this.#show(tree, Boolean(text || id), isNewSearch);
  }

  dispose() {}

  #showQuery() {
    const { text = "", id = "" } = this.#context.moment.route.params;
    put(this.#field, "value", id ? "id" : "text");
    put(this.#query, "value", id || text);
  }

  #search() {
    const name = /** @type {HTMLSelectElement} */ (this.#field).value;
    const query = /** @type {HTMLInputElement} */ (this.#query).value.trim();
    this.#context.moment.navigate("cache", "", { [name]: query }, { isNew: false });
  }

  /**
   * @param {any} tree
   * @param {boolean} isSearch
   * @param {boolean} isNewSearch whether the tree opens at the matches
   */
  #show(tree, isSearch, isNewSearch) {
    setText(this.#summary, summaryOf(tree));
    replace(this.#matches, isSearch && this.#matchList(tree));
    const atUs = this.#context.moment.atUs;
    if (!tree.roots.length) {
      const text = "A prefix appears here after a request with at least one full block of prompt tokens.";
      replace(this.#roots, emptyBox("No prefixes at this moment.", h("p", { class: "soft" }, text)));
      return;
    }
    if (this.#roots.firstElementChild?.classList.contains("empty")) replace(this.#roots);
    const view = { atUs, isSearch: isNewSearch && isSearch };
    reconcile(
      this.#roots,
      tree.roots,
      (root) => `${root.cache_namespace}/${root.lora_name}`,
      () => h("section", { class: "cache-root" }, h("h2"), h("ul", { class: "cache-list" }), h("p", { class: "soft" })),
      (element, root) => updateRoot(element, root, view),
    );
    if (tree.omitted_roots) this.#summary.append(` ${counted(tree.omitted_roots, "further cache")} not shown.`);
  }

  /** @param {any} tree */
  #matchList({ matches, matched }) {
    if (!matched) return h("p", {}, "No request of these matches the search.");
    const { atUs } = this.#context.moment;
    const items = matches.map((/** @type {any} */ one) =>
      h(
        "li",
        {},
        h("a", { href: linkTo("requests", one.offset, { id: one.request_id }, atUs) }, one.request_id),
        one.excerpt && h("span", { class: "soft" }, `  “${one.excerpt}”`),
      ),
    );
    const more = matched > matches.length ? `, the newest ${whole(matches.length)} of them:` : ":";
    return [h("p", {}, `${counted(matched, "request")} ${matched === 1 ? "matches" : "match"}${more}`), h("ul", { class: "matches" }, items)];
  }
}

/** @param {any} tree */
function summaryOf({ requests, is_complete, short, blocks }) {
  const which = is_complete ? `all ${counted(requests, "request")}` : `the newest ${counted(requests, "request")}`;
  const without = short ? `; ${whole(short)} of them without a full block` : "";
  return `Prompt prefixes of ${which} before this moment${without}. ${counted(blocks, "different block")}.`;
}

/**
 * @param {Element} element
 * @param {any} root
 * @param {{atUs: number|null, isSearch: boolean}} view
 */
function updateRoot(element, root, view) {
  const [title, list, more] = element.children;
  const adapter = root.lora_name ? `Adapter ${root.lora_name}` : "Base model";
  const namespace = root.cache_namespace ? `, cache namespace ${root.cache_namespace}` : "";
  setText(title, `${adapter}${namespace}: ${counted(root.requests, "request")}, blocks of ${root.block_size} tokens`);
  const node = { ...view, requests: root.requests };
  reconcile(list, root.children, keyOf, createNode, (item, child) => updateNode(item, child, node));
  put(more, "hidden", root.omitted_children === 0);
  setText(more, `${counted(root.omitted_children, "further prefix", "further prefixes")} with ${counted(root.omitted_hits, "request")} not shown.`);
}
