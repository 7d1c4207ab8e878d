// The methods board: a sortable table and a plot of loss over bytes, both of what the switches let through.
const board = dataOf("board-data");

function startBoard() {
  const { families, margin } = board;
  const rows = board.rows.map((row, index) => ({ ...row, index, familyName: families[row.family] }));
  const table = byId("board-table");
  const lines = [...table.tBodies[0].rows];
  const [studyChoice, scaleChoice] = [byId("board-study"), byId("board-scale")];
  const familyBoxes = [...document.querySelectorAll('input[name="board-family"]')];

  const inScale = (row) => !scaleChoice.value || row.scale === scaleChoice.value;
  const asked = (row) => inScale(row) && (!studyChoice.value || row.study === studyChoice.value);
  const passes = (row) => asked(row) && familyBoxes.some((box) => box.checked && box.value === row.family);

  scaleChoice.value = board.scale;
  // The study that compares methods where there is one, else the first.
  const here = rows.filter(inScale).map((row) => row.study);
  studyChoice.value = here.includes("methods") ? "methods" : here[0] ?? "";

  // Both ways, one seed comes after several, and what is missing last.
  function sortBy(key, down) {
    const last = (row) => (row[key] === null || row[key] === "" ? 2 : Number(row.n < 2));
    const order = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })) * (down ? -1 : 1);
    const value = (row) => (key === "family" ? row.familyName : row[key]);
    const compare = (a, b) => last(a) - last(b) || (last(a) === 2 ? 0 : order(value(a), value(b)));
    table.tBodies[0].append(...[...rows].sort(compare).map((row) => lines[row.index]));
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  // What the row's cells say.
  function tell({ row }) {
    const [name, family, n, share, bf16, gap, interval, verdict] = [...lines[row.index].cells].map((cell) => cell.textContent.trim());
    return [name, ...(studyChoice.value ? [] : [`study ${row.study}`]), ...(scaleChoice.value ? [] : [`scale ${row.scale}`]),
      `${family}, n = ${n}`, `${share} of fp32 bytes, ${bf16} of bf16`, `loss ${gap} nats${interval && ` (${interval})`}`,
      ...(verdict ? [verdict] : [])];
  }

  function plot() {
    const key = checkedOf("board-bytes");
    const points = rows.filter((row) => passes(row) && row.gap !== null && row[key] > 0)
      .map((row) => ({ row, share: 100 * row[key] })).sort((a, b) => a.share - b.share);
    const [shares, gaps] = [points.map((point) => point.share), points.map((point) => point.row.gap)];
    const against = key === "bytes" ? "an fp32" : "a bf16";
    return {
      x: { kind: logarithmic, ends: points.length ? [shares[0] / 1.35, shares.at(-1) * 1.35] : [1, 100], unit: " %",
        title: `bytes sent, of ${against} all-reduce` },
      y: { kind: bent, ends: [Math.min(-2 * margin, 1.4 * Math.min(...gaps)), Math.max(3 * margin, 1.5 * Math.max(...gaps))],
        title: points.length ? "validation loss above uncompressed (nats)" : "No variant passes the switches." },
      label: `Loss difference against the bytes of ${against} all-reduce, ${points.length} variants.`,
      paint: (inside, svg, x, y, room) => paint(points, inside, svg, x, y, room),
      tell, reach: 26,
    };
  }

  function paint(points, inside, svg, x, y, room) {
    shape(inside, "rect", { class: "margin", x: room.left, width: room.right - room.left, y: y(margin),
      height: y(-margin) - y(margin) });
    for (const point of points) {
      const { family, verdict, gap, low, high } = point.row;
      [point.x, point.y] = [x(point.share), y(gap)];
      if (low !== null) {
        shape(inside, "line", { class: "bar", x1: point.x, x2: point.x, y1: y(low), y2: y(high), stroke: `var(--${family})` });
      }
      point.node = shape(svg, "g", { class: "point", transform: `translate(${point.x} ${point.y})`, role: "img", tabindex: 0,
        "aria-label": tell(point).join(", ") });
      const style = verdict === "not tested" ? "hollow" : "full";
      shape(point.node, "use", { class: style, href: `#mark-${family}`, color: `var(--${family})` });
      shape(point.node, "circle", { class: "ring", r: 12 });
    }
    label(points, svg, room);
    return points;
  }

  // A label stands beside its point where it covers no mark and no other label; else the point tells it when pointed at.
  function label(points, svg, room) {
    const taken = points.map((point) => ({ x: point.x - 8, y: point.y - 8, width: 16, height: 16 }));
    const free = (box) => box.x >= room.left && box.x + box.width <= room.right && box.y >= room.top
      && box.y + box.height <= room.bottom && !taken.some((other) => box.x < other.x + other.width
      && other.x < box.x + box.width && box.y < other.y + other.height && other.y < box.y + box.height);
    for (const { row, x, y } of points) {
      const text = shape(svg, "text", { class: "label", "aria-hidden": "true" }, row.label);
      const { width, height } = text.getBBox();
      const spots = [[x + 11, y - height / 2], [x - 11 - width, y - height / 2], [x - width / 2, y - 11 - height], [x - width / 2, y + 11]];
      const spot = spots.map(([left, top]) => ({ x: left, y: top, width, height })).find(free);
      if (!spot) {
        text.remove();
        continue;
      }
      taken.push(spot);
      text.setAttribute("x", spot.x);
      text.setAttribute("y", spot.y + 0.78 * height);
    }
  }

  const draw = chart(byId("pareto"), plot);
  function update() {
    // Only what has rows at the scale, and in the study, can be chosen.
    for (const option of studyChoice.options) {
      option.hidden = option.disabled = option.value && !rows.some((row) => row.study === option.value && inScale(row));
    }
    if (studyChoice.selectedOptions[0]?.disabled) studyChoice.value = "";
    for (const box of familyBoxes) {
      box.closest("label").hidden = !rows.some((row) => row.family === box.value && asked(row));
    }
    for (const row of rows) lines[row.index].hidden = !passes(row);
    byId("board-count").textContent = `${rows.filter(passes).length} of ${rows.length} variants`;
    draw();
  }

  table.tHead.addEventListener("click", (event) => {
    const head = event.target.closest("button")?.parentElement;
    if (head) sortBy(head.dataset.key, head.getAttribute("aria-sort") === "ascending");
  });
  byId("board-switches").addEventListener("change", update);
  update();
}
if (board) startBoard();
