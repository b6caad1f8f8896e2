/**
 * A node of the cache tree: a run of blocks, its holders, and its continuations, which can be shown and hidden.
 *
 * @module views/cache_node
 */

import { h, put, reconcile, setStyle, setText } from "../dom.js";
import { counted, percent, whole } from "../format.js";
import { linkTo } from "../moment.js";

const TOKENS_SHOWN = 12;
const HOLDERS_SHOWN = 8;

/**
 * @typedef {object} NodeView
 * @property {number|null} atUs the chosen moment, which links keep
 * @property {number} requests number of requests of the root
 * @property {boolean} isSearch whether nodes that match a search open
 */

/** @type {WeakMap<Element, {node: any, view: NodeView}>} */
const shown = new WeakMap();

/**
 * Return a key of a node among its siblings, which differ in their first block.
 *
 * @param {any} node
 */
export function keyOf(node) {
  return node.token_ids.length ? node.token_ids.join(" ") : `${node.depth} ${node.blocks} ${node.hits} ${node.last_offset}`;
}

/** Create an empty node. */
export function createNode() {
  const toggle = h("button", { type: "button", class: "toggle", "aria-expanded": "false" });
  const list = h("ul", { class: "cache-list", hidden: true });
  const item = h(
    "li",
    {},
    h(
      "div",
      { class: "cache-node" },
      toggle,
      h("span", { class: "prefix" }),
      h("span", { class: "hits" }, h("span", { class: "hit-bar", "aria-hidden": "true" }), h("span")),
      h("span", { class: "run" }),
      h("span", { class: "holders" }),
      h("a", { class: "newest" }, "newest request"),
    ),
    list,
    h("p", { class: "soft omitted", hidden: true }),
  );
  toggle.addEventListener("click", () => open(item, toggle.getAttribute("aria-expanded") !== "true"));
  return item;
}

/**
 * Show a run of blocks in a node.
 *
 * @param {Element} item
 * @param {any} node
 * @param {NodeView} view
 */
export function updateNode(item, node, view) {
  shown.set(item, { node, view });
  const [toggle, prefix, hits, run, holders, newest] = item.children[0].children;
  const preview = previewOf(node);
  const isLeaf = node.children.length === 0;
  put(item.children[0], "data-match", node.is_match ? "true" : null);
  put(toggle, "disabled", isLeaf);
  put(toggle, "aria-label", isLeaf ? "No continuations" : `${counted(node.children.length, "continuation")} of ${preview}`);
  setText(prefix, preview);
  put(prefix, "data-kind", node.text === null ? "tokens" : "text");
  setStyle(hits.children[0], "--share", Math.min(1, node.hits / (view.requests || 1)).toFixed(4));
  setText(hits.children[1], `${counted(node.hits, "request")}, ${percent(node.hits / (view.requests || 1))}`);
  setText(run, `blocks ${whole(node.depth)} to ${whole(node.depth + node.blocks - 1)}`);
  put(run, "title", `${counted(node.blocks, "block")}, ${counted(node.tokens, "token")}`);
  showHolders(holders, node);
  put(newest, "href", linkTo("requests", node.last_offset, { id: node.last_request_id }, view.atUs));
  put(newest, "title", node.last_request_id);
  const isOpen = toggle.getAttribute("aria-expanded") === "true";
  open(item, !isLeaf && (isOpen || (view.isSearch && node.is_match)));
}

/**
 * Show or hide the continuations of a node. They are created when they are shown for the first time.
 *
 * @param {Element} item
 * @param {boolean} isOpen
 */
function open(item, isOpen) {
  const { node, view } = shown.get(item) ?? {};
  const [row, list, omitted] = item.children;
  put(row.children[0], "aria-expanded", String(isOpen));
  put(list, "hidden", !isOpen);
  put(omitted, "hidden", !isOpen || !node.omitted_children);
  if (!isOpen) return;
  const children = /** @type {any[]} */ (node.children);
  reconcile(list, children, keyOf, createNode, (child, one) => updateNode(child, one, /** @type {NodeView} */ (view)));
  const count = counted(node.omitted_children, "further continuation");
  setText(omitted, `${count} with ${counted(node.omitted_hits, "request")} not shown.`);
}

/** @param {any} node */
function previewOf({ text, token_ids }) {
  if (text !== null) return text.replaceAll("\n", "⏎ ");
  if (!token_ids.length) return "anonymised prompt";
  return `tokens ${token_ids.slice(0, TOKENS_SHOWN).join(" ")}${token_ids.length > TOKENS_SHOWN ? " …" : ""}`;
}

/**
 * @param {Element} element
 * @param {any} node
 */
function showHolders(element, { holders, omitted_holders, blocks }) {
  const few = holders.slice(0, HOLDERS_SHOWN);
  const more = holders.length - few.length + omitted_holders;
  const none = holders.length + omitted_holders === 0;
  const items = [
    ...few.map((/** @type {any} */ one) => ({ key: `${one.worker_id}/${one.rank}`, ...textOf(one, blocks) })),
    ...(more ? [{ key: "", text: `and ${whole(more)} more`, isWhole: true }] : []),
    ...(none ? [{ key: " ", text: "cached by no worker", isWhole: false }] : []),
  ];
  reconcile(
    element,
    items,
    (one) => one.key,
    () => h("span", { class: "holder" }),
    (holder, one) => {
      setText(holder, one.text);
      put(holder, "data-whole", one.isWhole ? "true" : null);
    },
  );
}

/**
 * @param {any} holder
 * @param {number} blocks blocks of the run
 */
function textOf({ worker_id, rank, device_blocks, host_blocks, disk_blocks, store_blocks }, blocks) {
  const name = rank ? `${worker_id}/${rank}` : worker_id;
  const lower = [
    ...(host_blocks ? [`${whole(host_blocks)} on host`] : []),
    ...(disk_blocks ? [`${whole(disk_blocks)} on disk`] : []),
    ...(store_blocks ? [`${whole(store_blocks)} in the store`] : []),
  ];
  const isWhole = device_blocks === blocks;
  const device = isWhole ? `${whole(blocks)}` : `${whole(device_blocks)} of ${whole(blocks)}`;
  return { text: `${name}: ${[device, ...lower].join(", ")}`, isWhole };
}
