// Builds and changes elements. Text is always set as text, so nothing that a server sends is HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value != null) node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child != null && child !== false));
  return node;
}

export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

export const byId = (id) => document.getElementById(id);

// Each of these touches the page only where something differs: a screen reader and the focus stay
// where they are, and a page that shows the same costs nothing.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value == null || value === false) {
    if (node.hasAttribute(name)) node.removeAttribute(name);
  } else if (node.getAttribute(name) !== String(value)) {
    node.setAttribute(name, value);
  }
}

export function show(node, shown) {
  setAttribute(node, "hidden", shown ? null : "");
  return shown;
}

// Makes the children of `parent` those of `items`, in their order; each key keeps its element.
export function sync(parent, items, { key, make, update }) {
  const known = (parent.known ??= new Map());
  const focused = document.activeElement;
  const wanted = new Set();
  let next = parent.firstElementChild;
  items.forEach((item, index) => {
    const name = String(key(item, index));
    wanted.add(name);
    let node = known.get(name);
    if (!node) known.set(name, (node = make(item)));
    update(node, item);
    if (node === next) next = next.nextElementSibling;
    else parent.insertBefore(node, next);
  });
  for (const [name, node] of known) {
    if (wanted.has(name)) continue;
    node.remove();
    known.delete(name);
  }
  // A row that moved has lost the focus of a button in it.
  if (focused !== document.activeElement && focused.isConnected) {
    focused.focus({ preventScroll: true });
  }
}
