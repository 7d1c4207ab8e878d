"""Settings of runs, verdicts on claims, seeds in which a policy acted, and figures, as pages of docs show them."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from edgc.errors import UserError, nearest
from experiments.cluster.slurm import parameters
from experiments.common import acting, figures, written_tables
from experiments.common.files import KEPT
from experiments.common.yaml_settings import load_yaml
from experiments.pages import claim_rows, pictures
from experiments.pages.kept import Kept, as_list
from experiments.spec import matrix
from experiments.spec.settings import RunConfig

SCALES = ("workstation", "ci")
NONE, UNKNOWN = "-", "not known here"
TEXTS = {
    "stdlib": "documentation and source of Python's standard library",
    "debian": "documentation of Debian packages",
    "openwebtext": "OpenWebText",
    "folder": "a folder of text",
}


def _size(run: RunConfig) -> str:
    count = parameters(run)
    return f"{count / 1e9:.1f} billion" if count >= 1e9 else f"{count / 1e6:.3g} million"


def _edgc(run: RunConfig) -> str:
    entropy = run.edgc.entropy
    values = f"{run.edgc.window}, {entropy.iteration_rate:g}, {entropy.entry_rate:g}"
    return values if run.edgc.method == "edgc" else NONE


FIELDS: dict[str, Callable[[RunConfig], str]] = {
    "model": lambda run: f"{run.model.architecture.upper()}, {run.model.layers} layers, {run.model.hidden} wide",
    "parameters": _size,
    "pipeline stages x replicas x tensor ranks": lambda run: (
        f"{run.parallel.pipeline} x {run.parallel.data} x {run.parallel.tensor}"
    ),
    "text": lambda run: TEXTS[run.data.source],
    "sequence length": lambda run: str(run.model.sequence_length),
    "sequences in a step": lambda run: str(run.train.global_batch),
    "iterations": lambda run: f"{run.train.iterations:,}".replace(",", " "),
    "peak learning rate": lambda run: f"{run.train.lr:g}",
    "precision": lambda run: run.train.precision,
    "EDGC: window, alpha, beta": _edgc,
}


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, without a line end; rows are as long as the header."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


@cache
def run_of(study: str, scale: str, name: str | None = None) -> RunConfig:
    """A run as the study's file has it, by default its first; of a study that evaluates models, of those models.

    Raises ``UserError`` where there is none of the name.
    """
    needs = matrix.load_study(study).needs
    known = {run.name: run for run in matrix.runs(next(iter(needs)) if needs else study, scale)}
    if name is None and known:
        return next(iter(known.values()))
    if name not in known:
        raise UserError(f"study {study} has no run {name!r} at scale {scale}", fix=nearest(str(name), known))
    return known[name]


def _machine(study: str, scale: str) -> str:
    """The cluster of a simulated study or of the paper's scale, else the machine that the kept runs name."""
    definition = matrix.load_study(study)
    if definition.simulated or scale == "paper":
        if not definition.cluster:
            return UNKNOWN
        nodes, each, name = (definition.cluster[key] for key in ("nodes", "gpus_per_node", "gpu"))
        guess = " (assumed)" if name["name"]["kind"] == "assumed" else ""
        cluster = f"{nodes['value'] * each['value']} {name['name']['value']}{guess} on {nodes['value']} nodes"
        return cluster if scale == "paper" else f"SIMULATED: {cluster}"
    trained = next(iter(definition.needs or [study]))
    for path in (KEPT / scale / trained / "provenance.yaml", KEPT / scale / "provenance.yaml"):
        if path.is_file() and (hardware := as_list(load_yaml(path).get("hardware"))):
            names = dict.fromkeys(f"{machine['cores']} CPU cores ({machine['cpu']})" for machine in hardware)
            return " and ".join(names) + ", no GPU"
    return "not recorded"


def link(path: Path, page: Path) -> str:
    """The address of a file on a page, relative as on GitHub."""
    return Path(os.path.relpath(path, page.parent)).as_posix()


@cache
def claims(scale: str) -> dict[str, dict[str, Any]]:
    """Rows of the report's table of claims by their names, as a page in the scale's folder would have them.

    Raises ``UserError`` where none are kept.
    """
    rows = claim_rows.rows(Kept(KEPT / scale, KEPT / scale / "page"), ())
    if rows is None:
        raise UserError(f"no verdicts are kept at scale {scale}", fix=f"make keep-claims SCALE={scale}")
    return {row["id"]: row for row in rows}


@dataclass(frozen=True)
class PageParts:
    """Parts of a page in Markdown, of what is kept in ``results/reference``; links lead from the page."""

    page: Path

    def settings(self, columns: Mapping[str, tuple[str, ...]]) -> str:
        """Settings side by side; a column is named, and is a study, a scale and, by default the first, a run."""
        runs = []
        for study, scale, *name in columns.values():
            real = "paper" if matrix.load_study(study).simulated else scale
            runs.append((run_of(study, real, *name), _machine(study, scale)))
        rows = [[name, *(field(run) for run, _ in runs)] for name, field in FIELDS.items()]
        rows = [row for row in rows if set(row[1:]) != {NONE}]
        return markdown_table(["", *columns], [*rows, ["machine", *(machine for _, machine in runs)]])

    def outcome(self, claim_ids: Sequence[str], scales: Sequence[str] = SCALES) -> str:
        """Cells of a table: the verdicts at each scale, and the kinds."""
        known = [[rows[c] for c in claim_ids if c in rows] for rows in map(claims, scales)]
        verdicts = [", ".join(dict.fromkeys(row["verdict"] for row in rows)) or NONE for rows in known]
        kinds = ", ".join(dict.fromkeys(row["kind"].upper() for rows in known for row in rows)) or NONE
        return " | ".join([*verdicts, kinds])

    def standing(self, claim_ids: Sequence[str], scales: Sequence[str] = SCALES) -> str:
        """The verdicts of these claims in one line, each scale's once."""
        *verdicts, kinds = self.outcome(claim_ids, scales).split(" | ")
        return f"Verdict, {kinds}: " + "; ".join(f"{s}: **{v}**" for s, v in zip(scales, verdicts, strict=True)) + "."

    def verdicts(self, claim_ids: Sequence[str] = (), scales: Sequence[str] = SCALES, notes: bool = True) -> str:
        """A row for each claim (by default all) and scale, then what each verdict rests on."""
        rows, rests = [], []
        known = {scale: claims(scale) for scale in scales}
        several = len(scales) > 1
        wanted = claim_ids or list(known[scales[0]])
        for claim, scale in ((c, s) for c in wanted for s in scales if c in known[s]):
            row = known[scale][claim]
            ours = f"{row['ours']} ({row['interval']})" if row["interval"] else row["ours"]
            seeds = "; ".join(filter(None, (row["n"], row["counts"])))
            tables = [
                f"[{'/'.join(table.name.split('/')[-2:])}]({link(KEPT / scale / table.href, self.page)})"
                for table in row["evidence"]
            ]
            cells = [f"{row['claim']} (`{claim}`)", row["paper"], *([scale] if several else []), ours, seeds]
            rows.append([*cells, row["kind"].upper(), f"**{row['verdict']}**", ", ".join(tables) or NONE])
            if row["note"]:
                parts = " ".join(row["note"].split()).split("; ")
                rests += [f"- `{claim}`, {scale}", *(f"    - {part}" for part in parts)]
        header = ["claim", "paper", *(["scale"] if several else []), "ours (95 % interval, or range)"]
        text = markdown_table([*header, "n (seeds)", "kind", "verdict", "evidence"], rows)
        return f"{text}\n\nWhat each verdict rests on:\n\n" + "\n".join(rests) if notes and rests else text

    def acted(self, *runs: tuple[str, ...]) -> str:
        """Number of seeds in which a policy acted; each of ``runs`` is a study, a scale and variants (default: all)."""
        lines = []
        for study, scale, *variants in runs:
            path = KEPT / scale / study / "table.csv"
            frame = written_tables.read(path, keep_default_na=False, na_values=[""])
            for name in variants or frame["variant"].unique():
                rows = frame[(frame["variant"] == name) & (frame["status"] == "ok")]
                seeds = acting.seeds_acted(rows) if len(rows) else None
                if seeds is not None:
                    ranks = ", ".join(f"{value:g}" for value in rows["ranks_used"])
                    inside = ", ".join(f"{value:.0%}" for value in rows["windows_inside"])
                    label = str(rows["label"].iloc[0])
                    lines.append([f"`{study}`", scale, label, f"{seeds} of {len(rows)}", ranks, inside])
        header = ["study", "scale", "run", "acted in seeds", "ranks used, by seed"]
        return markdown_table([*header, "windows inside the limits, by seed"], lines)

    def figure(self, name: str, scale: str = "workstation") -> str:
        """A committed figure with its caption."""
        path = KEPT / scale / "figures" / f"{name}.png"
        caption = " ".join(figures.caption(name).replace("``", "`").split())
        words = pictures.alternative(pictures.split_title(caption, name)[0], path)
        image = f"![{words.replace('[', '(').replace(']', ')').rstrip('.')}]({link(path, self.page)})"
        return f"{image}\n\n{caption} Scale: {scale}."
