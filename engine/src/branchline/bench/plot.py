"""The picture of a run: requests over time, latencies as distributions. Needs matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from branchline.bench.client import Sample

FORMATS = (".svg", ".png")


def fault(path: str) -> str | None:
    """Why a picture can't be written there; None if it can."""
    if Path(path).suffix not in FORMATS:
        return f"plot {path!r} must end with {' or '.join(FORMATS)}"
    if not Path(path).resolve().parent.is_dir():
        return f"plot {path!r} is in a folder that does not exist"
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "plot needs matplotlib: pip install 'branchline[bench]'"
    return None


def write(path: str, samples: Sequence[Sample], title: str) -> None:
    """Four panels: what ran when, output rate, first tokens, gaps. Raises OSError if the file can't be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    good = [sample for sample in samples if not sample.error]
    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    when, rate, first, gaps = figure.subplots(2, 2).flat
    for place, sample in enumerate(sorted(samples, key=lambda one: one.begun)):
        if sample.error:
            when.plot([sample.begun, sample.ended], [place, place], color="tab:red", linewidth=1)
            continue
        start = sample.chunks[0] if sample.chunks else sample.ended
        when.plot([sample.begun, start], [place, place], color="tab:orange", linewidth=1)
        when.plot([start, sample.ended], [place, place], color="tab:blue", linewidth=1)
    when.set(title="requests: to the first token, then output (red: failed)", xlabel="s", ylabel="request")
    end = max((sample.ended for sample in samples), default=1.0)
    bins = 50
    counts = [0.0] * bins
    for sample in good:
        share = sample.output_tokens / len(sample.chunks) if sample.chunks else 0.0
        for moment in sample.chunks:
            counts[min(int(moment / end * bins), bins - 1)] += share * bins / end
    rate.step([end * (place + 0.5) / bins for place in range(bins)], counts, where="mid")
    rate.set(title="output", xlabel="s", ylabel="tokens/s", ylim=(0, None))
    for axes, values, name in (
        (first, [one.ttft * 1e3 for one in good if one.ttft is not None], "first token"),
        (gaps, [gap * 1e3 for one in good for gap in one.gaps], "between pieces"),
    ):
        ordered = sorted(values)
        axes.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post")
        axes.set(title=name, xlabel="ms", ylabel="share of them", ylim=(0, 1.02))
    for axes in (when, rate, first, gaps):
        axes.grid(alpha=0.3)
    figure.savefig(path)
