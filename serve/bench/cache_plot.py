"""A picture of what each tier gains: hit rate by tier, and time to first token, over the working set."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from serve.bench.cache_figures import TIERS, Figures

_NAMES = {"device": "device", "host": "device + host", "disk": "device + host + disk"}
_COLOURS = {"device": "tab:green", "host": "tab:blue", "disk": "tab:orange"}


def save_cache_plot(path: Path, title: str, results: Mapping[str, Sequence[Figures]]) -> None:
    """results: figures by setup, one for each working set. Writes a PNG; raises OSError when it cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shape = (1, len(results) + 1)
    figure, axes = pyplot.subplots(*shape, figsize=(4.5 * shape[1], 4.2), layout="constrained", squeeze=False)
    figure.suptitle(title)
    *hit_axes, ttft = axes[0]
    for axis, (setup, figures) in zip(hit_axes, results.items(), strict=True):
        sets = [each.working_set for each in figures]
        below = [0.0] * len(sets)
        for tier in TIERS:
            top = [low + each.hit_rate[tier] for low, each in zip(below, figures, strict=True)]
            axis.fill_between(sets, below, top, alpha=0.6, color=_COLOURS[tier], label=tier)
            below = top
        axis.plot(sets, below, "k.-")
        axis.set(
            title=f"hit rate, {_NAMES[setup]}",
            xlabel="distinct prefixes",
            ylabel="share of prompt tokens",
            ylim=(0, 1.02),
        )
        axis.legend(loc="lower left")
        ttft.plot(sets, [each.ttft_p50_ms for each in figures], "o-", label=_NAMES[setup], color=_COLOURS[setup])
    first = next(iter(results.values()))
    sets = [each.working_set for each in first]
    ttft.plot(sets, [each.cold_ttft_p50_ms for each in first], "k:", label="nothing cached")
    ttft.set(title="median time to first token", xlabel="distinct prefixes", ylabel="ms")
    ttft.set_ylim(bottom=0)
    ttft.legend()
    for axis in axes[0]:
        axis.set_xticks(sets)
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)
