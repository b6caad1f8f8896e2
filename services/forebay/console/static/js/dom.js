/** Build and update the DOM. Every text becomes a text node, so text from the log is never markup. */

const SVG = "http://www.w3.org/2000/svg";
// Control, format, surrogate, private and unassigned characters, and separators of lines and paragraphs.
const UNPRINTABLE = /[^\P{C}\n\t]|[\p{Zl}\p{Zp}]/gu;
const PLAIN = /^[ -~]*$/; // most texts, for which the slower search is not needed
const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "open", "selected", "indeterminate"]);

/** Escape characters that cannot be seen or that change the text direction, as `forebay` does on a terminal. */
export function printable(value) {
  const shown = String(value);
  if (PLAIN.test(shown)) return shown;
  return shown.replace(UNPRINTABLE, (one) => {
    const code = one.codePointAt(0) ?? 0;
    if (code < 0x100) return `\\x${code.toString(16).padStart(2, "0")}`;
    return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}` : `\\U${code.toString(16).padStart(8, "0")}`;
  });
}

/**
 * Create an HTML element.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Record<string, any>} props attributes. `on...` adds an event listener, `style` is an object of CSS
 *   properties, and `dataset` an object of data attributes. null, undefined and false leave an attribute out.
 * @param {...Child} children
 */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

export function svg(/** @type {keyof SVGElementTagNameMap} */ tag, props = {}, /** @type {Child[]} */ ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

/** Create a text node with printable characters. */
export function text(value) {
  return document.createTextNode(printable(value));
}

/**
 * Set an attribute or a property, unless the element has this value already.
 * value: null, undefined and false remove an attribute
 */
export function put(/** @type {Element} */ element, name, value) {
  if (PROPERTIES.has(name)) {
    if (element[name] !== value) element[name] = value;
  } else if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else {
    const shown = value === true ? "" : printable(value);
    if (element.getAttribute(name) !== shown) element.setAttribute(name, shown);
  }
}

/** Make a text the only content of an element, unless it is already. */
export function setText(/** @type {Element} */ element, value) {
  const shown = printable(value);
  const only = element.firstChild;
  if (only instanceof Text && !only.nextSibling) {
    if (only.data !== shown) only.data = shown;
  } else if (only || shown) element.replaceChildren(shown);
}

/** Set a CSS property, for example `--share`. The content security policy allows this, but no `style` attribute. */
export function setStyle(element, name, value) {
  const { style } = element;
  if (style.getPropertyValue(name) !== String(value)) style.setProperty(name, String(value));
}

export function replace(/** @type {Element} */ element, /** @type {Child[]} */ ...children) {
  element.replaceChildren(...nodesOf(children));
}

const lists = new WeakMap();

/**
 * Make the children of `parent` correspond to `items`, in their order. An element remains as long as its key does, so
 * that focus and selection survive, and only what changed is laid out again. `parent` must have no other children.
 * @template T
 * @param {Element} parent
 * @param {T[]} items of several items with the same key, only the first is shown
 * @param {(item: T) => unknown} key
 * @param {(item: T) => Element} create
 * @param {(element: any, item: T) => void} update called for new elements, too
 */
export function reconcile(parent, items, key, create, update = () => {}) {
  const before = lists.get(parent) ?? new Map();
  const after = new Map();
  for (const item of items) {
    const id = key(item);
    if (after.has(id)) continue;
    const element = before.get(id) ?? create(item);
    update(element, item);
    after.set(id, element);
  }
  for (const [id, element] of before) if (!after.has(id)) element.remove();
  let next = parent.firstElementChild;
  for (const element of after.values()) {
    if (element === next) next = element.nextElementSibling;
    else parent.insertBefore(element, next);
  }
  lists.set(parent, after);
}

/** @template {HTMLElement | SVGElement} E @param {E} element @param {Record<string, any>} props @param {Child[]} children */
function filled(element, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else if (name === "style") for (const [property, one] of Object.entries(value)) setStyle(element, property, one);
    else if (name === "dataset") for (const [key, one] of Object.entries(value)) put(element, `data-${key}`, one);
    else if (!PROPERTIES.has(name)) put(element, name, value);
  }
  element.append(...nodesOf(children));
  // The value of a select is one of its options, so properties come last.
  for (const name of PROPERTIES) if (props[name] !== undefined) put(element, name, props[name]);
  return element;
}

/** @param {Child[]} children @returns {Node[]} */
function nodesOf(children) {
  return children.flatMap((child) => {
    if (child === null || child === undefined || child === false) return [];
    if (Array.isArray(child)) return nodesOf(child);
    return [child instanceof Node ? child : text(child)];
  });
}
