"""What a comparison found: figures, the table of ratios, and the picture."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from minisgl.bench.compare.contender import Cell, Contender, Grid, Times

PHASES = ("decode", "prefill")
Rounds = Mapping[str, Sequence[Mapping[Cell, Times]]]
"""By the name of each system, its times in every round."""


def rate(cell: Cell, times: Times, phase: str, output_tokens: int) -> float:
    """Tokens a second of all sequences together."""
    if phase == "prefill":
        return cell.batch * cell.prompt_tokens / times.prefill
    return cell.batch * output_tokens / times.decode


def figures(grid: Grid, rounds: Rounds, ours: str) -> list[dict[str, Any]]:
    """For each phase and cell: by system the rate of every round and their median; by rival our
    median over its own, and the lowest and highest ratio within a round."""
    found = []
    for phase in PHASES:
        for cell in grid.cells:
            rates = {
                name: [rate(cell, times[cell], phase, grid.output_tokens) for times in runs]
                for name, runs in rounds.items()
            }
            row: dict[str, Any] = {
                "phase": phase, "batch": cell.batch, "prompt_tokens": cell.prompt_tokens,
                "tokens_per_second": {name: median(all) for name, all in rates.items()},
                "rounds": rates, "ratios": {},
            }  # fmt: skip
            for name, theirs in rates.items():
                if name != ours:
                    each = [a / b for a, b in zip(rates[ours], theirs, strict=True)]
                    row["ratios"][name] = {
                        "ratio": median(rates[ours]) / median(theirs),
                        "lowest": min(each),
                        "highest": max(each),
                    }
            found.append(row)
    return found


def ratio_table(rows: Sequence[dict[str, Any]], ours: str) -> str:
    """Tokens a second of every system, and how many times each rival's rate ours is."""
    rivals = [name for name in rows[0]["tokens_per_second"] if name != ours]
    lines = [f"{'tokens/s':<8}{'batch':>6}{'prompt':>8}{ours:>12}{'ms a step':>11}"]
    lines[0] += "".join(f"{name:>14}{'times':>7}{'in rounds':>13}" for name in rivals)
    for row in rows:
        rates = row["tokens_per_second"]
        line = f"{row['phase']:<8}{row['batch']:>6}{row['prompt_tokens']:>8}{rates[ours]:>12,.1f}"
        tokens = row["batch"] * (row["prompt_tokens"] if row["phase"] == "prefill" else 1)
        line += f"{1e3 * tokens / rates[ours]:>11,.2f}"
        for name in rivals:
            of = row["ratios"][name]
            line += f"{rates[name]:>14,.1f}{of['ratio']:>7.2f}"
            line += f"{of['lowest']:>7.2f}-{of['highest']:.2f}".rjust(13)
        lines.append(line)
    return "\n".join(lines)


def phase_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds of each phase of the CPU kernels, in a step of each cell, and their sum."""
    names = list(rows[0]["seconds"])
    columns = "".join(f"{name:>{max(11, len(name) + 2)}}" for name in (*names, "all"))
    lines = [f"{'ms':<8}{'batch':>6}{'prompt':>8}{columns}"]
    for row in sorted(rows, key=lambda row: PHASES.index(row["phase"])):
        values = {**row["seconds"], "all": sum(row["seconds"].values())}
        cells = "".join(f"{1e3 * v:>{max(11, len(k) + 2)},.3f}" for k, v in values.items())
        lines.append(f"{row['phase']:<8}{row['batch']:>6}{row['prompt_tokens']:>8}{cells}")
    return "\n".join(lines)


def plot_comparison(
    rows: Sequence[dict[str, Any]], systems: Sequence[Contender], path: str, title: str
) -> None:
    """Write a PNG: a panel for decoding and one for prefill, over batches or prompt lengths."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    figure.suptitle(title)
    several = len({row["prompt_tokens"] for row in rows}) > 1
    for axis, phase in zip(axes, PHASES, strict=True):
        of_phase = [row for row in rows if row["phase"] == phase]
        labels = [
            f"{row['batch']} x {row['prompt_tokens']}" if several else str(row["batch"])
            for row in of_phase
        ]
        places = range(len(labels))
        for at, system in enumerate(systems):
            rates = [row["tokens_per_second"][system.name] for row in of_phase]
            label = f"{system.name} ({system.weights})"
            if len(labels) > 4:
                axis.plot(places, rates, marker="o", label=label)
                continue
            width = 0.8 / len(systems)
            offset = (at - (len(systems) - 1) / 2) * width
            bars = axis.bar([x + offset for x in places], rates, width * 0.95, label=label)
            axis.bar_label(bars, [f"{r:,.0f}" for r in rates], fontsize=8, padding=1)
        axis.set_xticks(places, labels)
        axis.set(
            xlabel="sequences x prompt tokens" if several else "sequences at a time",
            ylabel="tokens/s", title=phase,
        )  # fmt: skip
        axis.set_ylim(bottom=0)
        axis.grid(axis="y", alpha=0.3)
    axes[0].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
