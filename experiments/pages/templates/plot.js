// What both plots need: SVG elements, scales, axes, a box that tells of the point under the pointer.
const byId = (id) => document.getElementById(id);
const dataOf = (id) => (byId(id) ? JSON.parse(byId(id).textContent) : null);
const checkedOf = (name) => document.querySelector(`input[name="${name}"]:checked`)?.value;

function element(name, attributes = {}, text = null, space = "http://www.w3.org/1999/xhtml") {
  const made = document.createElementNS(space, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  return made;
}

function shape(parent, name, attributes = {}, text = null) {
  const made = element(name, attributes, text, "http://www.w3.org/2000/svg");
  parent.append(made);
  return made;
}

// How an axis bends: its transform, and ticks between two numbers, at most about `most`.
const linear = {
  of: (value) => value,
  ticks(low, high, most) {
    const power = 10 ** Math.floor(Math.log10((high - low) / most));
    const step = power * [1, 2, 5, 10].find((digit) => digit * power >= (high - low) / most);
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, k) => Number(((first + k) * step).toPrecision(10)));
  },
};
const logarithmic = {
  of: Math.log10,
  ticks(low, high, most) {
    const all = (digits) => Array.from({ length: 20 }, (_, k) => digits.map((digit) => Number(`${digit}e${k - 9}`))).flat()
      .filter((value) => value >= low && value <= high);
    return all([1, 2, 5]).length > most ? all([1]) : all([1, 2, 5]);
  },
};
// Linear up to 0.01, logarithmic beyond.
const bent = {
  of: (value) => (Math.abs(value) <= 0.01 ? value / 0.01 : Math.sign(value) * (3 + Math.log10(Math.abs(value)))),
  ticks: (low, high) =>
    [-3, -1, -0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3].filter((value) => value >= low && value <= high),
};
const written = (value) => value.toLocaleString("en", { maximumSignificantDigits: 10 }).replaceAll(",", " ").replace("-", "−");

// A plot of the box's width with axes; x and y say kind, ends, unit, title. `paint` gets a group that is cut off at the
// axes, the plot, both scales, and the ends of the axes in pixels; it gives back points that `tell` describes in lines.
// The plot is drawn now and whenever the box gets another width.
function chart(box, describe) {
  const tip = box.appendChild(element("div", { class: "tip", hidden: "", "aria-hidden": "true" }));
  const clip = `${box.id}-clip`;
  let width = 0;

  function draw() {
    const { x, y, label, paint, tell, reach } = describe();
    const narrow = width < 560;
    const height = narrow ? 380 : 470;
    const [left, right, top, bottom] = [56, width - 20, 28, height - 46];
    tip.hidden = true;
    box.querySelector("svg")?.remove();
    const svg = shape(box, "svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": label });
    const scale = ({ kind, ends }, from, to) => (value) =>
      from + ((kind.of(value) - kind.of(ends[0])) / (kind.of(ends[1]) - kind.of(ends[0]) || 1)) * (to - from);
    const [across, up] = [scale(x, left, right), scale(y, bottom, top)];
    const axes = shape(svg, "g", { class: "axis", "aria-hidden": "true" });
    for (const tick of x.kind.ticks(...x.ends, narrow ? 5 : 10)) {
      shape(axes, "line", { class: "grid", x1: across(tick), x2: across(tick), y1: top, y2: bottom });
      shape(axes, "text", { x: across(tick), y: bottom + 18, "text-anchor": "middle" }, written(tick) + (x.unit || ""));
    }
    for (const tick of y.kind.ticks(...y.ends, 6)) {
      shape(axes, "line", { class: tick ? "grid" : "zero", x1: left, x2: right, y1: up(tick), y2: up(tick) });
      shape(axes, "text", { x: left - 8, y: up(tick) + 4, "text-anchor": "end" }, written(tick));
    }
    shape(axes, "text", { class: "title", x: (left + right) / 2, y: height - 6, "text-anchor": "middle" }, x.title);
    shape(axes, "text", { class: "title", x: 4, y: 13 }, y.title);
    shape(shape(svg, "clipPath", { id: clip }), "rect", { x: left, y: top, width: right - left, height: bottom - top });
    const inside = shape(svg, "g", { "clip-path": `url(#${clip})`, "aria-hidden": "true" });
    const points = paint(inside, svg, across, up, { left, right, top, bottom });

    function show(point) {
      tip.hidden = !point;
      if (!point) return;
      tip.replaceChildren(...tell(point).map((line, index) => element(index ? "span" : "strong", {}, line)));
      tip.style.left = `${Math.max(0, Math.min(width - tip.offsetWidth, point.x + 14))}px`;
      const above = point.y - tip.offsetHeight - 14;
      tip.style.top = `${above > 0 ? above : point.y + 16}px`;
    }
    svg.addEventListener("pointermove", (event) => {
      const at = svg.getBoundingClientRect();
      const far = (point) => Math.hypot(point.x - event.clientX + at.left, point.y - event.clientY + at.top);
      const near = points.reduce((best, point) => (far(point) < best.far ? { far: far(point), point } : best), { far: reach });
      show(near.point);
    });
    svg.addEventListener("pointerleave", () => show(null));
    for (const point of points.filter((one) => one.node)) {
      point.node.addEventListener("focus", () => show(point));
      point.node.addEventListener("blur", () => show(null));
    }
    svg.addEventListener("keydown", (event) => { if (event.key === "Escape") show(null); });
  }

  new ResizeObserver(() => {
    if (box.clientWidth && box.clientWidth !== width) {
      width = box.clientWidth;
      draw();
    }
  }).observe(box);
  return () => { if (width) draw(); };
}
