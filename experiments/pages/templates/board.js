// The methods board: a sortable table and a plot of loss over bytes, both of what the switches let through.
const board = dataOf("board-data");

function startBoard() {
  const { families, margin } = board;
  const rows = board.rows.map((row, index) => ({ ...row, index, familyName: families[row.family] }));
  const table = byId("board-table");
  const lines = [...table.tBodies[0].rows];
  const [studyChoice, scaleChoice] = [byId("board-study"), byId("board-scale")];
  const familyBoxes = [...document.querySelectorAll('input[name="board-family"]')];
  let sorted = { key: null, down: false };

  const inScale = (row) => !scaleChoice.value || row.scale === scaleChoice.value;
  const asked = (row) => inScale(row) && (!studyChoice.value || row.study === studyChoice.value);
  const passes = (row) => asked(row) && familyBoxes.some((box) => box.checked && box.value === row.family);

  scaleChoice.value = board.scale;
  // The study that compares methods where there is one, else the one with the most rows.
  const size = (study) => (study === "methods" ? Infinity : rows.filter((row) => row.study === study).length);
  const here = [...new Set(rows.filter(inScale).map((row) => row.study))];
  studyChoice.value = here.reduce((best, study) => (size(study) > size(best) ? study : best), here[0] ?? "");

  // Both ways, one seed comes after several, and what is missing last.
  const group = (row) => (row[sorted.key] === null || row[sorted.key] === "" ? 2 : Number(row.n < 2));
  function compare(a, b) {
    const [one, two] = [a, b].map((row) => (sorted.key === "family" ? row.familyName : row[sorted.key]));
    if (group(a) !== group(b) || group(a) === 2) return group(a) - group(b);
    const order = typeof one === "number" ? one - two : one.localeCompare(two, "en", { numeric: true });
    return sorted.down ? -order : order;
  }

  function sortBy(key, down) {
    sorted = { key, down };
    table.tBodies[0].append(...[...rows].sort(compare).map((row) => lines[row.index]));
    for (const head of table.tHead.rows[0].cells) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  const tell = ({ row }) => [
    row.label,
    ...(studyChoice.value ? [] : [`study ${row.study}`]),
    ...(scaleChoice.value ? [] : [`scale ${row.scale}`]),
    `${row.familyName}, n = ${row.shown.n}`,
    `${row.shown.bytes} of fp32 bytes, ${row.shown.bytes_bf16} of bf16`,
    `loss ${row.shown.gap} nats${row.shown.interval ? ` (${row.shown.interval})` : ""}`,
    ...(row.verdict ? [row.verdict] : []),
  ];

  function light(chosen) {
    for (const marked of document.querySelectorAll("#pareto [data-row]")) {
      marked.classList.toggle("active", marked.dataset.row === String(chosen?.row.index));
    }
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
      label: `Loss difference against the bytes of ${against} all-reduce, ${points.length} variants. Use the arrow keys.`,
      paint: (inside, svg, x, y, room) => paint(points, inside, svg, x, y, room),
      tell, light, reach: 26,
    };
  }

  function paint(points, inside, svg, x, y, room) {
    shape(inside, "rect", { class: "margin", x: room.left, width: room.right - room.left, y: y(margin),
      height: y(-margin) - y(margin) });
    for (const point of points) {
      const { row } = point;
      [point.x, point.y] = [x(point.share), y(row.gap)];
      if (row.low !== null) {
        shape(inside, "line", { class: "bar", "data-row": row.index, x1: point.x, x2: point.x, y1: y(row.low), y2: y(row.high),
          stroke: `var(--${row.family})` });
      }
    }
    points.forEach((point) => {
      const { row } = point;
      point.node = shape(svg, "g", { class: "point", "data-row": row.index, transform: `translate(${point.x} ${point.y})`,
        role: "img", tabindex: -1, "aria-label": tell(point).join(", ") });
      const style = row.verdict === "not tested" ? "hollow" : "full";
      shape(point.node, "use", { class: style, href: `#mark-${row.family}`, color: `var(--${row.family})` });
      shape(point.node, "circle", { class: "ring", r: 12 });
    });
    // One stop of the tabulator key, arrows within, by bytes.
    points[0]?.node.setAttribute("tabindex", 0);
    svg.addEventListener("keydown", (event) => {
      const at = points.findIndex((point) => point.node === event.target);
      const last = points.length - 1;
      const to = { ArrowRight: Math.min(last, at + 1), ArrowLeft: Math.max(0, at - 1), Home: 0, End: last }[event.key];
      if (at < 0 || to === undefined) return;
      event.preventDefault();
      points[at].node.setAttribute("tabindex", -1);
      points[to].node.setAttribute("tabindex", 0);
      points[to].node.focus();
    });
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
    const key = event.target.closest("button")?.parentElement.dataset.key;
    if (key) sortBy(key, sorted.key === key && !sorted.down);
  });
  byId("board-switches").addEventListener("change", update);
  byId("board-switches").addEventListener("submit", (event) => event.preventDefault());
  update();
}
if (board) startBoard();
