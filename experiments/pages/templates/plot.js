// What both plots need: SVG elements, scales, ticks, marks of the families, a tooltip.
const byId = (id) => document.getElementById(id);
const dataOf = (id) => (byId(id) ? JSON.parse(byId(id).textContent) : null);

function element(name, attributes = {}, text = null) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function shape(parent, name, attributes = {}, text = null) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  parent.append(made);
  return made;
}

// A mark of its own for each family, so that no reader depends on its colour; r: half its size in pixels.
const MARKS = {
  dense: (r) => `M ${-r} 0 a ${r} ${r} 0 1 0 ${2 * r} 0 a ${r} ${r} 0 1 0 ${-2 * r} 0 Z`,
  quantization: (r) => `M ${-r} ${-0.45 * r} L ${-0.45 * r} ${-r} L 0 ${-0.5 * r} L ${0.45 * r} ${-r} L ${r} ${-0.45 * r}
    L ${0.5 * r} 0 L ${r} ${0.45 * r} L ${0.45 * r} ${r} L 0 ${0.5 * r} L ${-0.45 * r} ${r} L ${-r} ${0.45 * r}
    L ${-0.5 * r} 0 Z`,
  sparsification: (r) => `M ${-r} ${-0.8 * r} L ${r} ${-0.8 * r} L 0 ${r} Z`,
  powersgd: (r) => `M ${-0.85 * r} ${-0.85 * r} h ${1.7 * r} v ${1.7 * r} h ${-1.7 * r} Z`,
  edgc: (r) => `M 0 ${-1.15 * r} L ${1.15 * r} 0 L 0 ${1.15 * r} L ${-1.15 * r} 0 Z`,
  given: (r) => `M ${-r} ${0.8 * r} L ${r} ${0.8 * r} L 0 ${-r} Z`,
  other: (r) => `M ${-r} ${-0.3 * r} h ${0.7 * r} v ${-0.7 * r} h ${0.6 * r} v ${0.7 * r} h ${0.7 * r} v ${0.6 * r}
    h ${-0.7 * r} v ${0.7 * r} h ${-0.6 * r} v ${-0.7 * r} h ${-0.7 * r} Z`,
};
const colourOf = (family) => `var(--${MARKS[family] ? family : "other"})`;
const markOf = (family, r) => (MARKS[family] || MARKS.other)(r);

for (const key of document.querySelectorAll(".key[data-family]")) {
  const svg = shape(key, "svg", { viewBox: "-8 -8 16 16" });
  shape(svg, "path", { d: markOf(key.dataset.family, 6.5), fill: colourOf(key.dataset.family) });
}

// A scale maps numbers to pixels: transform says how, domain and range are two numbers each.
function scale(transform, domain, range) {
  const [low, high] = domain.map(transform);
  return (value) => range[0] + ((transform(value) - low) / (high - low || 1)) * (range[1] - range[0]);
}
const same = (value) => value;
const symlog = (linear) => (value) =>
  Math.abs(value) <= linear ? value / linear : Math.sign(value) * (1 + Math.log10(Math.abs(value) / linear));

function evenTicks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((digit) => digit * power).find((value) => value >= raw) || raw;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high * (1 + 1e-9); k += 1) found.push(Number((k * step).toPrecision(10)));
  return found;
}

function logTicks(low, high, most) {
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
    for (const digit of [1, 2, 5]) {
      const value = Number((digit * 10 ** k).toPrecision(3));
      if (value >= low && value <= high) found.push([value, digit]);
    }
  }
  return (found.length > most ? found.filter(([, digit]) => digit === 1) : found).map(([value]) => value);
}

// An empty plot with axes: x and y say scale, ticks, how a tick is written, and the title.
function frame(box, width, height, pad, x, y, label) {
  box.querySelector("svg")?.remove();
  const svg = shape(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": label });
  const axes = shape(svg, "g", { class: "axis", "aria-hidden": "true" });
  for (const tick of x.ticks) {
    const at = x.scale(tick);
    shape(axes, "line", { class: "grid", x1: at, x2: at, y1: pad.top, y2: height - pad.bottom });
    shape(axes, "text", { x: at, y: height - pad.bottom + 18, "text-anchor": "middle" }, x.write(tick));
  }
  for (const tick of y.ticks) {
    const at = y.scale(tick);
    shape(axes, "line", { class: tick === 0 ? "zero" : "grid", x1: pad.left, x2: width - pad.right, y1: at, y2: at });
    shape(axes, "text", { x: pad.left - 8, y: at + 4, "text-anchor": "end" }, y.write(tick));
  }
  const middle = (pad.left + width - pad.right) / 2;
  shape(axes, "text", { class: "title", x: middle, y: height - 6, "text-anchor": "middle" }, x.title);
  shape(axes, "text", { class: "title", x: 4, y: 13 }, y.title);
  const clip = shape(shape(svg, "defs"), "clipPath", { id: `${box.id}-clip` });
  shape(clip, "rect", { x: pad.left, y: pad.top, width: width - pad.left - pad.right, height: height - pad.top - pad.bottom });
  return svg;
}

// A box beside a point of a plot; lines: the first in bold.
function tooltip(box) {
  const tip = element("div", { class: "tip", hidden: "", "aria-hidden": "true" });
  box.append(tip);
  return {
    show(lines, x, y) {
      tip.replaceChildren(...lines.map((line, index) => element(index ? "span" : "strong", {}, line)));
      tip.hidden = false;
      const room = box.clientWidth - tip.offsetWidth;
      tip.style.left = `${Math.max(0, Math.min(room, x + 14))}px`;
      const above = y - tip.offsetHeight - 14;
      tip.style.top = `${above > 0 && x + 14 > room ? above : Math.max(0, y - tip.offsetHeight / 2)}px`;
      if (x + 14 > room && above <= 0) tip.style.top = `${y + 16}px`;
    },
    hide() {
      tip.hidden = true;
    },
  };
}

// Draws now, and again when the box gets another width.
function responsive(box, draw) {
  let width = 0;
  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== width) {
      width = box.clientWidth;
      draw();
    }
  }).observe(box);
}
const checkedOf = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;
