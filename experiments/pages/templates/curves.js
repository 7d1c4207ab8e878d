// Learning curves: every run of one study; the chosen variants in front, in colours of their own.
const curves = dataOf("curves-data");

function startCurves() {
  const box = byId("curves-plot");
  const tip = tooltip(box);
  const chips = byId("curves-variants");
  const studyChoice = byId("curves-study");
  const MOST = 8; // colours
  let chosen = []; // numbers of variants, in the order in which they were chosen
  let hovered = null;

  const study = () => curves.studies[studyChoice.value];

  // The losses of a run less those of the uncompressed run of its seed, at the iterations that both have.
  function above(run, runs, plain) {
    const other = runs.find((one) => one.of === plain && one.seed === run.seed);
    if (!other) return run.y.map(() => null);
    const at = new Map(other.x.map((step, k) => [step, other.y[k]]));
    return run.y.map((loss, k) => (loss === null || at.get(run.x[k]) == null ? null : loss - at.get(run.x[k])));
  }

  function colour(of) {
    const place = chosen.indexOf(of);
    return place >= 0 ? `var(--c${place % MOST})` : colourOf(study().variants[of].family);
  }

  function draw() {
    const { variants, runs } = study();
    const xKey = checkedOf("curves-x");
    const plain = variants.findIndex((one) => one.family === "dense");
    const differs = checkedOf("curves-y") === "above" && plain >= 0;
    tip.hide();
    const width = box.clientWidth;
    const narrow = width < 560;
    const height = narrow ? 360 : 460;
    const pad = { left: 56, right: narrow ? 14 : 190, top: 28, bottom: 46 };
    const series = runs
      .map((run) => ({ run, x: run[xKey], y: differs ? above(run, runs, plain) : run.y }))
      .filter(({ x }) => x.length);
    const end = Math.max(...runs.flatMap((run) => run.x.slice(-1)));
    // Axes from a fifth of the run on, and without what lies far above the others: the start is steep.
    const late = series.map(({ run, y }) => y.filter((loss, k) => loss !== null && run.x[k] >= 0.2 * end)).filter((l) => l.length);
    const highs = late.map((losses) => Math.max(...losses)).sort((a, b) => a - b);
    const lows = late.map((losses) => Math.min(...losses));
    let low = Math.min(...lows);
    let high = highs[Math.floor(0.75 * (highs.length - 1))];
    if (differs) [low, high] = [Math.min(low, -0.005), Math.max(high, 0.01)];
    const ys = [low - 0.05 * (high - low), high + 0.08 * (high - low)];
    const all = series.flatMap(({ run, x }) => x.filter((_, k) => xKey === "x" || run.x[k] >= 0.02 * end));
    const xs = xKey === "x" ? [0, end] : [Math.min(...all.filter((v) => v > 0)), Math.max(...all)];
    const x = scale(xKey === "x" ? same : Math.log10, xs, [pad.left, width - pad.right]);
    const y = scale(same, ys, [height - pad.bottom, pad.top]);
    const svg = frame(
      box, width, height, pad,
      { scale: x, ticks: xKey === "x" ? evenTicks(...xs, narrow ? 4 : 8) : logTicks(...xs, narrow ? 5 : 10),
        write: (t) => t.toLocaleString("en").replaceAll(",", " "), title: xKey === "x" ? "iteration" : "gradient bytes sent by a replica (MB, log scale)" },
      { scale: y, ticks: evenTicks(...ys, 6), write: (t) => String(t).replace("-", "−"),
        title: differs ? "training loss above uncompressed (nats)" : "training loss (nats)" },
      `Learning curves of ${runs.length} runs of study ${studyChoice.value}; the tables hold the numbers.`,
    );
    const lines = shape(svg, "g", { "clip-path": `url(#${box.id}-clip)`, "aria-hidden": "true" });
    const front = ({ run }) => chosen.indexOf(run.of) + 1 || (run.of === hovered ? 99 : 0);
    const ordered = [...series].sort((a, b) => front(a) - front(b));
    for (const one of ordered) {
      const { run } = one;
      let pen = "M";
      const path = [];
      one.x.forEach((value, k) => {
        if (one.y[k] === null || !(value > 0)) pen = "M";
        else {
          path.push(`${pen}${x(value).toFixed(1)} ${y(one.y[k]).toFixed(1)}`);
          pen = "L";
        }
      });
      const strong = front(one) > 0;
      shape(lines, "path", { class: "run", d: path.join(""), stroke: colour(run.of), "stroke-width": strong ? 1.5 : 1,
        opacity: strong ? 1 : chosen.length ? 0.22 : 0.5, "stroke-dasharray": run.status === "ok" ? "none" : "4 3" });
      if (strong && !differs) {
        for (const [step, loss] of run.v) {
          const k = xKey === "x" ? -1 : run.x.findIndex((value) => value >= step);
          const at = xKey === "x" ? step : run.b[k];
          if (at > 0) shape(lines, "circle", { cx: x(at), cy: y(loss), r: 2.6, fill: colour(run.of) });
        }
      }
    }
    if (!narrow) names(svg, series, x, y, width - pad.right, [pad.top, height - pad.bottom]);
    svg.addEventListener("pointermove", (event) => nearest(event, svg, ordered, x, y, differs));
    svg.addEventListener("pointerleave", () => tip.hide());
  }

  // The chosen variants' names at the right, at the heights of their ends, moved apart where these are close.
  function names(svg, series, x, y, at, [top, bottom]) {
    const found = chosen.map((of) => {
      const ends = series.filter(({ run }) => run.of === of).map(({ y: losses }) => losses.findLast((loss) => loss !== null));
      const fine = ends.filter((loss) => loss != null);
      return { of, y: Math.max(top, Math.min(bottom, y(fine.reduce((a, b) => a + b, 0) / (fine.length || 1)))) };
    });
    found.sort((a, b) => a.y - b.y);
    found.forEach((one, k) => { if (k) one.y = Math.max(one.y, found[k - 1].y + 16); });
    const over = found.length ? found[found.length - 1].y - bottom : 0;
    for (const one of found) {
      const text = shape(svg, "text", { class: "label", x: at + 8, y: one.y - Math.max(0, over) + 4, "aria-hidden": "true",
        style: `fill: ${colour(one.of)}` }, study().variants[one.of].label);
      while (text.getComputedTextLength() > 178) text.textContent = `${text.textContent.slice(0, -2)}…`;
    }
  }

  function nearest(event, svg, series, x, y, differs) {
    const at = svg.getBoundingClientRect();
    const [px, py] = [event.clientX - at.left, event.clientY - at.top];
    let best = { far: 30 };
    for (const one of series) {
      one.x.forEach((value, k) => {
        if (one.y[k] === null || !(value > 0)) return;
        const far = Math.hypot(x(value) - px, y(one.y[k]) - py) - (chosen.includes(one.run.of) ? 6 : 0);
        if (far < best.far) best = { far, run: one.run, k, value: one.y[k], px: x(value), py: y(one.y[k]) };
      });
    }
    if (!best.run) return tip.hide();
    const { run, k } = best;
    return tip.show([
      `${study().variants[run.of].label}, seed ${run.seed}`,
      `iteration ${run.x[k]}, ${run.b[k]} MB sent`,
      `${differs ? "above uncompressed" : "training loss"} ${best.value.toFixed(4)} nats`,
      ...(run.status === "ok" ? [] : [run.status]),
    ], best.px, best.py);
  }

  function choose(of) {
    chosen = chosen.includes(of) ? chosen.filter((one) => one !== of) : [...chosen, of].slice(-MOST);
    paint();
  }

  function paint() {
    [...chips.children].forEach((chip, of) => {
      chip.setAttribute("aria-pressed", String(chosen.includes(of)));
      chip.firstChild.replaceChildren();
      const svg = shape(chip.firstChild, "svg", { viewBox: "-8 -8 16 16" });
      shape(svg, "path", { d: markOf(study().variants[of].family, 6.5), fill: colour(of) });
    });
    draw();
  }

  function start() {
    const { variants } = study();
    chips.replaceChildren(...variants.map((variant, of) => {
      const chip = element("button", { type: "button", class: "chip", "aria-pressed": "false" });
      chip.append(element("span", { class: "key", "aria-hidden": "true" }), variant.label);
      chip.addEventListener("click", () => choose(of));
      for (const [kind, value] of [["pointerenter", of], ["pointerleave", null], ["focus", of], ["blur", null]]) {
        chip.addEventListener(kind, () => { hovered = value; draw(); });
      }
      return chip;
    }));
    // At first uncompressed training and the first of each other family.
    const families = variants.map((one) => one.family);
    chosen = variants.map((_, of) => of).filter((of) => families.indexOf(families[of]) === of).slice(0, 5);
    paint();
  }

  studyChoice.addEventListener("change", start);
  byId("curves-switches").addEventListener("change", (event) => { if (event.target !== studyChoice) draw(); });
  byId("curves-switches").addEventListener("submit", (event) => event.preventDefault());
  start();
  responsive(box, draw);
}
if (curves) startCurves();
