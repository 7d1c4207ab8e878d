// The methods board: a sortable table and a plot of loss over bytes, both of what the switches let through.
const board = dataOf("board-data");

function startBoard() {
  const { rows, families, margin } = board;
  const body = byId("board-table").tBodies[0];
  const lines = new Map([...body.rows].map((line) => [Number(line.dataset.row), line]));
  const box = byId("pareto");
  const tip = tooltip(box);
  const studyChoice = byId("board-study");
  const scaleChoice = byId("board-scale");
  let sorted = { key: null, down: false };
  let active = null; // row number of the point that has the focus

  scaleChoice.value = board.scale;
  // The study that compares methods where there is one, else the one with the most rows.
  const inScale = (row) => !scaleChoice.value || row.scale === scaleChoice.value;
  const mostRows = (study) => (study === "methods" ? Infinity : rows.filter((row) => row.study === study && inScale(row)).length);
  const studies = [...new Set(rows.filter(inScale).map((row) => row.study))];
  studyChoice.value = studies.reduce((best, study) => (mostRows(study) > mostRows(best) ? study : best));

  const bytesKey = () => checkedOf("board-bytes");
  function visible() {
    const chosen = new Set([...document.querySelectorAll('input[name="board-family"]:checked')].map((box) => box.value));
    return rows.map((row, index) => ({ ...row, index })).filter((row) => chosen.has(row.family) && asked(row));
  }
  const asked = (row) => inScale(row) && (!studyChoice.value || row.study === studyChoice.value);

  // Only what has rows at the scale, and in the study, can be chosen.
  function offer() {
    for (const option of studyChoice.options) {
      const none = option.value !== "" && !rows.some((row) => row.study === option.value && inScale(row));
      option.hidden = option.disabled = none;
    }
    if (studyChoice.selectedOptions[0]?.disabled) studyChoice.value = "";
    for (const box of document.querySelectorAll('input[name="board-family"]')) {
      box.closest("label").hidden = !rows.some((row) => row.family === box.value && asked(row));
    }
  }

  function compare(a, b) {
    const [one, two] = [a[sorted.key], b[sorted.key]].map((value) => (value === "" ? null : value));
    if (one === null || two === null) return (one === null) - (two === null); // what is missing comes last, both ways
    const order = typeof one === "number" ? one - two : one.localeCompare(two, "en", { numeric: true });
    return sorted.down ? -order : order;
  }

  function sortBy(key) {
    sorted = { key, down: sorted.key === key && !sorted.down };
    const order = rows.map((row, index) => ({ ...row, index, family: families[row.family] })).sort(compare);
    body.append(...order.map((row) => lines.get(row.index)));
    for (const head of document.querySelectorAll("#board-table thead th")) {
      if (head.dataset.key === key) head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    }
  }

  // Of one study, the points of which no other has as few bytes and as little loss; by bytes.
  function frontOf(points, key) {
    const found = [];
    for (const point of [...points].sort((a, b) => a[key] - b[key] || a.gap - b.gap)) {
      if (!found.length || point.gap < found[found.length - 1].gap) found.push(point);
    }
    return found;
  }

  function describe(row) {
    const several = !studyChoice.value;
    return [
      row.label,
      ...(several ? [`study ${row.study}`] : []),
      ...(scaleChoice.value ? [] : [`scale ${row.scale}`]),
      `${families[row.family]}, n = ${row.shown.n}`,
      `${row.shown.bytes} of fp32 bytes, ${row.shown.bytes_bf16} of bf16`,
      `loss ${row.shown.gap} nats${row.shown.interval ? ` (${row.shown.interval})` : ""}`,
      ...(row.verdict ? [row.verdict] : []),
    ];
  }

  function draw() {
    const key = bytesKey();
    const points = visible().filter((row) => row.gap !== null && row[key] > 0);
    tip.hide();
    box.querySelector("svg")?.remove();
    if (!points.length) {
      const svg = shape(box, "svg", { viewBox: "0 0 300 60", height: 60, role: "group", "aria-label": "No points" });
      shape(svg, "text", { x: 10, y: 30 }, "No variant passes the switches.");
      return;
    }
    const width = box.clientWidth;
    const narrow = width < 560;
    const height = narrow ? 400 : 480;
    const pad = { left: narrow ? 44 : 52, right: narrow ? 14 : 26, top: 28, bottom: 46 };
    const shares = points.map((row) => 100 * row[key]);
    const xs = [Math.min(...shares) / 1.35, Math.max(...shares) * 1.35];
    const gaps = points.map((row) => row.gap);
    const bend = symlog(0.01);
    const ys = [Math.min(-2 * margin, 1.4 * Math.min(...gaps)), Math.max(3 * margin, 1.5 * Math.max(...gaps))];
    const x = scale(Math.log10, xs, [pad.left, width - pad.right]);
    const y = scale(bend, ys, [height - pad.bottom, pad.top]);
    const inside = [-3, -1, -0.3, -0.1, -0.03, -0.01, 0, 0.01, 0.03, 0.1, 0.3, 1, 3].filter((t) => t >= ys[0] && t <= ys[1]);
    const against = key === "bytes" ? "fp32" : "bf16";
    const svg = frame(
      box, width, height, pad,
      { scale: x, ticks: logTicks(...xs, narrow ? 5 : 12), write: (t) => `${t} %`,
        title: `${narrow ? "" : "gradient "}bytes sent, of ${against === "fp32" ? "an" : "a"} ${against} all-reduce` },
      { scale: y, ticks: inside, write: (t) => String(t).replace("-", "−"), title: "validation loss above uncompressed (nats)" },
      `Loss difference against ${against} bytes, ${points.length} variants. Use the arrow keys to go through them.`,
    );
    const clip = `url(#${box.id}-clip)`;
    shape(svg, "rect", { class: "margin", "clip-path": clip, x: pad.left, width: width - pad.left - pad.right,
      y: y(margin), height: y(-margin) - y(margin) });
    const together = (row) => `${row.scale}/${row.study}`;
    const fronts = [...new Set(points.map(together))].map((place) =>
      frontOf(points.filter((row) => together(row) === place), key));
    const places = points
      .map((row) => ({ row, x: x(100 * row[key]), y: y(row.gap) }))
      .sort((a, b) => a.x - b.x || a.y - b.y);
    const bars = shape(svg, "g", { "clip-path": clip, "aria-hidden": "true" });
    for (const { row, x: at } of places.filter(({ row }) => row.low !== null)) {
      shape(bars, "line", { class: "bar", "data-row": row.index, x1: at, x2: at, y1: y(row.low), y2: y(row.high),
        stroke: colourOf(row.family) });
    }
    for (const front of fronts) {
      const path = front.map((row, k) => `${k ? `H ${x(100 * row[key])} V` : `M ${x(100 * row[key])}`} ${y(row.gap)}`);
      shape(svg, "path", { class: "front", "clip-path": clip, d: path.join(" ") });
    }
    const nodes = places.map((place) => point(svg, place, narrow ? 5 : 6));
    const labelled = fronts.flat().map((row) => places.find((place) => place.row === row));
    // A front goes right from a point and then down to the next: boxes a little wider than its lines.
    const steps = fronts.flatMap((front) => front.slice(1).flatMap((row, k) => {
      const [left, right] = [x(100 * front[k][key]), x(100 * row[key])];
      const [upper, lower] = [y(front[k].gap), y(row.gap)];
      return [{ x: left, y: upper - 1, width: right - left, height: 2 },
        { x: right - 1, y: upper, width: 2, height: lower - upper }];
    }));
    label(svg, labelled, places, steps, { left: pad.left, right: width - 4, top: pad.top, bottom: height - pad.bottom });
    keys(nodes, places);
    svg.addEventListener("pointermove", (event) => {
      const at = svg.getBoundingClientRect();
      const near = places
        .map((place, k) => ({ k, far: Math.hypot(place.x - event.clientX + at.left, place.y - event.clientY + at.top) }))
        .reduce((best, one) => (one.far < best.far ? one : best));
      if (near.far < 26) activate(nodes, places, near.k);
      else rest(nodes);
    });
    svg.addEventListener("pointerleave", () => rest(nodes));
  }

  function point(svg, { row, x, y }, r) {
    const node = shape(svg, "g", { class: "point", transform: `translate(${x.toFixed(2)} ${y.toFixed(2)})`, role: "img", tabindex: -1,
      "aria-label": describe(row).join(", "), "data-row": row.index });
    const hollow = row.verdict === "not tested";
    shape(node, "path", { d: markOf(row.family, r), fill: hollow ? "var(--surface)" : colourOf(row.family),
      stroke: hollow ? colourOf(row.family) : "var(--surface)", "stroke-width": hollow ? 2 : 1 });
    shape(node, "circle", { class: "ring", r: r + 6 });
    return node;
  }

  function activate(nodes, places, k) {
    light(nodes, k);
    tip.show(describe(places[k].row), places[k].x, places[k].y);
  }
  function rest(nodes) {
    const focused = nodes.indexOf(document.activeElement);
    light(nodes, focused);
    tip.hide();
  }
  function light(nodes, k) {
    nodes.forEach((node, other) => node.classList.toggle("active", other === k));
    const row = nodes[k]?.dataset.row;
    for (const bar of box.querySelectorAll(".bar")) bar.classList.toggle("active", bar.dataset.row === row);
  }

  // One stop of the tabulator key, arrows within: left and right by bytes, up and down by loss.
  function keys(nodes, places) {
    const byLoss = places.map((_, k) => k).sort((a, b) => places[b].y - places[a].y);
    const first = Math.max(0, places.findIndex((place) => place.row.index === active));
    nodes[first].setAttribute("tabindex", 0);
    const go = (from, to) => {
      nodes[from].setAttribute("tabindex", -1);
      nodes[to].setAttribute("tabindex", 0);
      nodes[to].focus();
    };
    const bound = (k) => Math.max(0, Math.min(nodes.length - 1, k));
    nodes.forEach((node, k) => {
      node.addEventListener("focus", () => {
        active = places[k].row.index;
        activate(nodes, places, k);
      });
      node.addEventListener("blur", () => rest(nodes));
      node.addEventListener("keydown", (event) => {
        const rank = byLoss.indexOf(k);
        const to = { ArrowRight: bound(k + 1), ArrowLeft: bound(k - 1), Home: 0, End: nodes.length - 1,
          ArrowUp: byLoss[bound(rank + 1)], ArrowDown: byLoss[bound(rank - 1)] }[event.key];
        if (event.key === "Escape") tip.hide();
        if (to === undefined) return;
        event.preventDefault();
        go(k, to);
      });
    });
  }

  // Labels beside their points where they cover no mark, front or other label, else further off with a line; one
  // that fits nowhere is left to the tooltip.
  function label(svg, wanted, places, steps, room) {
    const layer = shape(svg, "g", { "aria-hidden": "true" });
    const taken = [...places.map(({ x, y }) => ({ x: x - 8, y: y - 8, width: 16, height: 16 })), ...steps];
    const free = (box) =>
      box.x >= room.left && box.x + box.width <= room.right && box.y >= room.top && box.y + box.height <= room.bottom &&
      !taken.some((o) => box.x < o.x + o.width && o.x < box.x + box.width && box.y < o.y + o.height && o.y < box.y + box.height);
    for (const { row, x, y } of wanted) {
      const text = shape(layer, "text", { class: "label" }, row.label);
      const { width, height } = text.getBBox();
      const offsets = [];
      for (const far of [12, 26, 42, 62, 86, 112]) {
        for (const [dx, dy] of [[1, 0], [0.75, -0.75], [0.75, 0.75], [-0.75, 0.75], [-0.75, -0.75], [-1, 0], [0, 1], [0, -1]]) {
          offsets.push({ dx: dx * far, dy: dy * far, far });
        }
      }
      const spot = offsets
        .map(({ dx, dy, far }) => ({ far, x: x + dx - (dx < 0 ? width : dx === 0 ? width / 2 : 0), y: y + dy - height / 2, dx, dy }))
        .find((one) => free({ x: one.x, y: one.y, width, height }));
      if (!spot) {
        text.remove();
        continue;
      }
      text.setAttribute("x", spot.x);
      text.setAttribute("y", spot.y + 0.78 * height);
      taken.push({ x: spot.x - 2, y: spot.y, width: width + 4, height });
      if (spot.far > 20) {
        const end = 1 - 4 / spot.far;
        shape(layer, "line", { class: "leader", x1: x + (8 * spot.dx) / spot.far, y1: y + (8 * spot.dy) / spot.far,
          x2: x + spot.dx * end, y2: y + spot.dy * end });
      }
    }
  }

  function update() {
    offer();
    const shown = new Set(visible().map((row) => row.index));
    for (const [index, line] of lines) line.hidden = !shown.has(index);
    for (const head of document.querySelectorAll("#board-table thead th")) {
      head.classList.toggle("chosen", head.dataset.key === bytesKey());
    }
    // Sorted by the bytes of one precision, the table follows the switch to the other.
    if (["bytes", "bytes_bf16"].includes(sorted.key) && sorted.key !== bytesKey()) {
      const { down } = sorted;
      sortBy(bytesKey());
      if (down) sortBy(bytesKey());
    }
    byId("board-count").textContent = `${shown.size} of ${rows.length} variants`;
    draw();
  }

  for (const button of document.querySelectorAll("#board-table thead button")) {
    button.addEventListener("click", () => sortBy(button.closest("th").dataset.key));
  }
  byId("board-switches").addEventListener("change", update);
  byId("board-switches").addEventListener("submit", (event) => event.preventDefault());
  update();
  responsive(box, draw);
}
if (board) startBoard();
