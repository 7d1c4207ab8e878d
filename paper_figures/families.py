"""How each family of methods, estimator and architecture looks: one colour, marker and line in every figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import seaborn as sns

from edgc.compressors.sizes import FACTOR_BITS
from edgc.config import methods
from edgc.control.settings import PolicyConfig

if TYPE_CHECKING:
    import pandas as pd


Line = str | tuple[int, tuple[float, ...]]


class Family(NamedTuple):
    """How one family of methods looks in every figure."""

    key: str
    label: str
    colour: str
    marker: str
    line: Line = "-"

    def marks(self, line: Line = "", *, filled: bool = True) -> dict[str, Any]:
        """matplotlib's keywords for points of this look, joined by ``line`` (none by default), or open ones."""
        face = {} if filled else {"markerfacecolor": "white"}
        return {"color": self.colour, "marker": self.marker, "linestyle": line} | face


def _registered() -> dict[str, Family]:
    """Methods, and policies that have a look of their own, as their files say."""
    found: dict[str, Family] = {}
    for kind in methods():
        key = kind.method if kind.look is PolicyConfig.look else getattr(kind, "policy", kind.method)
        found.setdefault(key, Family(key, *kind.look))
    return found


# Okabe-Ito colours first; the marker differs too, so that grey print and every colour vision can tell them
# apart.
FAMILIES: dict[str, Family] = _registered() | {
    f.key: f
    for f in (
        Family("selective", "Selective (Optimus-CC)", "#CC79A7", "p", "--"),
        Family("factors_bf16", "PowerSGD, bf16 factors", "#7FB2D9", "8"),
        Family("factors_int8", "PowerSGD, int8 factors", "#004D80", "H"),
        Family("factors_int7", "PowerSGD, int7 factors", "#006070", "$7$"),
        Family("factors_int6", "PowerSGD, int6 factors", "#007A80", "$6$"),
        Family("factors_int5", "PowerSGD, int5 factors", "#009590", "$5$"),
        Family("factors_int4", "PowerSGD, int4 factors", "#00B0A0", "*"),
        Family("one_sided", "PowerSGD, int4, one-sided", "#5C6B00", "1"),
        Family("edgc_bf16", "EDGC, bf16 factors", "#F0A070", "4"),
        Family("edgc_int8", "EDGC, int8 factors", "#AA3377", "d"),
        Family("edgc_int7", "EDGC, int7 factors", "#BB4077", r"$\bar{7}$"),
        Family("edgc_int6", "EDGC, int6 factors", "#CC4D77", r"$\bar{6}$"),
        Family("edgc_int5", "EDGC, int5 factors", "#DD5A77", r"$\bar{5}$"),
        Family("edgc_int4", "EDGC, int4 factors", "#EE6677", "+"),
        Family("given", "ranks given, after a warm-up", "#4B0F6B", r"$\clubsuit$"),
        Family("other", "other", "#888888", ".", ":"),
    )
}
_WORDS = (
    ("spectral", ("spectral",)),
    ("released", ("released",)),
    ("selective", ("selective", "optimus")),
    ("edgc", ("edgc", "cqm")),
    ("powersgd", ("powersgd", "fixed", "rank")),
    ("topk", ("topk", "top_k", "top-k")),
    ("randomk", ("randomk", "random_k", "random-k", "randk")),
    ("quantize", ("quant", "int8", "int4", "int2")),
    ("sign", ("sign",)),
    ("bf16", ("bf16", "fp16")),
    ("none", ("none", "uncompressed", "megatron", "dense")),
    *((kind.method, (kind.method,)) for kind in methods()),
)

ESTIMATORS: dict[str, Family] = {
    f.key: f
    for f in (
        Family("histogram", "histogram", "#0072B2", "o"),
        Family("gaussian", "Gaussian", "#D55E00", "s", "--"),
        Family("vasicek", "Vasicek", "#009E73", "^", "-."),
        Family("released", "released code (discrete)", "#CC79A7", "v", ":"),
    )
}
ARCHITECTURES: dict[str, Family] = {
    "gpt": Family("gpt", "GPT", "#0072B2", "o"),
    "bert": Family("bert", "BERT", "#D55E00", "s", "--"),
}
MARKERS = "osD^vP<>Xph*"


def family(name: str, policy: str | None = None) -> Family:
    """The family of a method, variant name or label ("powersgd_r8", "EDGC (cqm)"); never fails.

    Args:
        name: ``compression.method``, a variant's name or a label.
        policy: ``compression.policy``, which tells the EDGC policies apart.
    """
    text = f"{name} {policy if policy and 'edgc' in name.lower() else ''}".lower()
    for key, words in _WORDS:
        if any(word in text for word in words):
            return FAMILIES[key]
    return FAMILIES["other"]


def by_name(name: str) -> Family:
    """As :func:`family`, of names that tell the type of the factors: ``factors_int8_r64``, ``powersgd_r32_int4``."""
    for dtype in FACTOR_BITS.keys() - {"fp32"}:
        if name.startswith(f"factors_{dtype}") or (name.startswith("powersgd") and name.endswith(f"_{dtype}")):
            return FAMILIES[f"factors_{dtype}"]
    return family(name)


def look(run: pd.Series) -> Family:
    """The family of a row of a methods table, by its settings; the type of the factors tells some apart."""
    if run["method"] == "powersgd" and run["one_sided"] in (True, "True"):
        return FAMILIES["one_sided"]
    if run["method"] == "powersgd" and run["factor_dtype"] != "fp32":
        return FAMILIES[f"factors_{run['factor_dtype']}"]
    if run["method"] == "edgc" and run["policy"] in ("fixed", "schedule"):
        return FAMILIES["given"]
    if run["method"] == "edgc" and run["factor_dtype"] != "fp32":
        return FAMILIES[f"edgc_{run['factor_dtype']}"]
    if str(run.get("label", "")).startswith("selective"):
        return FAMILIES["selective"]
    return family(str(run["method"]), str(run["policy"]))


def stage_colours(count: int) -> list[tuple[float, float, float]]:
    """One colour per pipeline stage, ordered from dark (first) to light (last)."""
    return list(sns.color_palette("viridis", n_colors=count + 1)[:count])
