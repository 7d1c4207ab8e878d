// Learning curves: every run of one study; the chosen variants in front, in colours of their own.
const curves = dataOf("curves-data");

function startCurves() {
  const [chips, studyChoice] = [byId("curves-variants"), byId("curves-study")];
  const MOST = 8; // colours
  let chosen = []; // numbers of variants, in the order in which they were chosen
  let variants, runs, plain;

  // The losses of a run less those of the uncompressed run of its seed, at the iterations that both have.
  function above(run) {
    const other = runs.find((one) => one.of === plain && one.seed === run.seed);
    const at = new Map(other?.x.map((step, k) => [step, other.y[k]]));
    return run.y.map((loss, k) => (loss === null || at.get(run.x[k]) == null ? null : loss - at.get(run.x[k])));
  }

  const colour = (of) => `var(--${chosen.includes(of) ? `c${chosen.indexOf(of) % MOST}` : variants[of].family})`;

  function plot() {
    const bytes = checkedOf("curves-x") === "b";
    const differs = checkedOf("curves-y") === "above" && plain >= 0;
    const series = runs.map((run) => ({ run, x: bytes ? run.b : run.x, y: differs ? above(run) : run.y }));
    const end = Math.max(...runs.flatMap((run) => run.x.slice(-1)));
    // Axes from a fifth of the run on, and without what lies far above the others: the start is steep.
    const late = series.map(({ run, y }) => y.filter((loss, k) => loss !== null && run.x[k] >= 0.2 * end)).filter((l) => l.length);
    const highs = late.map((losses) => Math.max(...losses)).sort((a, b) => a - b);
    const low = Math.min(...late.flat(), differs ? -0.005 : Infinity);
    const high = Math.max(highs[Math.floor(0.75 * (highs.length - 1))], differs ? 0.01 : -Infinity);
    const sent = series.flatMap(({ run }) => run.b.filter((value, k) => value > 0 && run.x[k] >= 0.02 * end));
    return {
      x: bytes ? { kind: logarithmic, ends: [Math.min(...sent), Math.max(...sent)], title: "gradient bytes sent by a replica (MB, log scale)" }
        : { kind: linear, ends: [0, end], title: "iteration" },
      y: { kind: linear, ends: [low - 0.05 * (high - low), high + 0.08 * (high - low)],
        title: differs ? "training loss above uncompressed (nats)" : "training loss (nats)" },
      label: `Learning curves of ${runs.length} runs of study ${studyChoice.value}; the tables hold the numbers.`,
      paint: (inside, svg, x, y) => series.sort((a, b) => chosen.indexOf(a.run.of) - chosen.indexOf(b.run.of))
        .flatMap((one) => line(one, inside, x, y, bytes, differs)),
      tell: ({ run, k, value }) => [
        `${variants[run.of].label}, seed ${run.seed}`,
        `iteration ${run.x[k]}, ${run.b[k]} MB sent`,
        `${differs ? "above uncompressed" : "training loss"} ${value.toFixed(4)} nats`,
        ...(run.status === "ok" ? [] : [run.status]),
      ],
      reach: 30,
    };
  }

  // Draws a run; gives the points that are there.
  function line({ run, x: steps, y: losses }, inside, x, y, bytes, differs) {
    const strong = chosen.includes(run.of);
    const there = (k) => losses[k] != null && (steps[k] > 0 || !bytes);
    const points = steps.flatMap((step, k) => (there(k) ? [{ run, k, value: losses[k], x: x(step), y: y(losses[k]) }] : []));
    const path = points.map((point) => `${point.k && there(point.k - 1) ? "L" : "M"}${point.x.toFixed(1)} ${point.y.toFixed(1)}`);
    shape(inside, "path", { class: "run", d: path.join(""), stroke: colour(run.of), "stroke-width": strong ? 1.5 : 1,
      opacity: strong ? 1 : chosen.length ? 0.22 : 0.5, "stroke-dasharray": run.status === "ok" ? "none" : "4 3" });
    for (const [step, loss] of strong && !differs ? run.v : []) {
      const at = bytes ? run.b[run.x.findIndex((value) => value >= step)] : step;
      if (at > 0) shape(inside, "circle", { cx: x(at), cy: y(loss), r: 2.6, fill: colour(run.of) });
    }
    return points;
  }

  function paint() {
    [...chips.children].forEach((chip, of) => {
      chip.setAttribute("aria-pressed", String(chosen.includes(of)));
      chip.firstChild.replaceChildren();
      const svg = shape(chip.firstChild, "svg", { viewBox: "-8 -8 16 16", color: colour(of) });
      shape(svg, "use", { href: `#mark-${variants[of].family}` });
    });
    draw();
  }

  function start() {
    ({ variants, runs } = curves.studies[studyChoice.value]);
    plain = variants.findIndex((one) => one.family === "dense");
    chips.replaceChildren(...variants.map((variant, of) => {
      const chip = element("button", { type: "button", class: "chip" });
      chip.append(element("span", { class: "key", "aria-hidden": "true" }), variant.label);
      chip.addEventListener("click", () => {
        chosen = chosen.includes(of) ? chosen.filter((one) => one !== of) : [...chosen, of].slice(-MOST);
        paint();
      });
      return chip;
    }));
    // At first the first of each family, uncompressed training among them.
    const families = variants.map((one) => one.family);
    chosen = variants.map((_, of) => of).filter((of) => families.indexOf(families[of]) === of).slice(0, 5);
    paint();
  }

  const draw = chart(byId("curves-plot"), plot);
  byId("curves-switches").addEventListener("change", (event) => (event.target === studyChoice ? start() : draw()));
  start();
}
if (curves) startCurves();
