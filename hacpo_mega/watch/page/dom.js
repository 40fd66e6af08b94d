// Elements made from data. Text becomes text nodes only, so an answer that holds a tag shows the tag.

const HANDLER = /^on[a-z]+$/;
const SPOKEN = ["title", "aria-label"]; // attributes that people read
// Characters that a browser obeys instead of showing, the same as in models/files/visible.py; line ends and tabs stay.
const OBEYED = /[^\P{C}\n\t]|[\p{Zl}\p{Zp}\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\u{e0100}-\u{e01ef}]/gu;

/** Text whose direction, width and controls are written out, so that it cannot hide or reorder its neighbours. */
export function visible(text) {
  return text.replace(OBEYED, (sign) => {
    if (sign === "\r") return "\\r";
    const code = sign.codePointAt(0);
    const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
    return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  });
}

/**
 * An element. `props`: class, attributes, and handlers as functions (onclick); null and false leave an attribute out.
 * `children`: nodes, text, numbers or lists of them; null is left out.
 */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (HANDLER.test(name)) {
      if (typeof value !== "function") throw new TypeError(`${name} must be a function`);
      node.addEventListener(name.slice(2), value);
    } else if (name === "href" && !/^(#|\/(?!\/))/.test(value)) {
      throw new TypeError("a link leads into this page");
    } else {
      node.setAttribute(name, value === true ? "" : SPOKEN.includes(name) ? visible(String(value)) : String(value));
    }
  }
  add(node, children);
  return node;
}

/** Appends nodes, text, numbers, or lists of them. */
export function add(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(visible(String(child))));
  }
  return node;
}

/** Replaces what a node holds. */
export function fill(node, ...children) {
  node.replaceChildren();
  return add(node, ...children);
}

/** A labelled field of a form; `props` as of `el`, and `options` make it a choice. */
export function field(label, props, options = null) {
  const control = options
    ? el("select", props, options.map(([value, text]) => el("option", { value, selected: value === props.value }, text)))
    : el("input", props);
  return el("label", { class: "field" }, el("span", {}, label), control);
}

/** A button. */
export function button(text, onclick, props = {}) {
  return el("button", { type: "button", onclick, ...props }, text);
}

/** A number for people: as many digits as tell it apart, a dash where there is none. */
export function show(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  if (size !== 0 && size < 1e-2) return value.toPrecision(2);
  if (size < 10) return value.toFixed(3);
  if (size < 1000) return value.toFixed(1);
  if (size < 1e6) return value.toLocaleString("en", { maximumFractionDigits: 0 });
  for (const [unit, scale] of [["T", 1e12], ["G", 1e9], ["M", 1e6]]) {
    if (size >= scale) return `${(value / scale).toFixed(2)} ${unit}`;
  }
  return String(value);
}

/** Seconds as people say them. */
export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "–";
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
