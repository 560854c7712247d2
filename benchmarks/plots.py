"""Draw the figures of `papers.py`: tokens per target pass, and modelled speed-up, against the budget.

python benchmarks/plots.py benchmarks/results/papers.json benchmarks/results/papers.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

METHODS = {  # name in the table -> colour and line; the papers' methods are solid
    "chain 4": ("0.6", ":"),
    "k-ary": ("tab:brown", "--"),
    "Sequoia": ("tab:orange", "--"),
    "top-k": ("tab:blue", "--"),
    "top-k + GSD": ("tab:cyan", "-"),
    "DySpec": ("tab:green", "-"),
    "DySpec calibrated": ("tab:olive", "-"),
    "SpecDec++ 0.7": ("tab:purple", "-"),
    "DySpec by head": ("tab:red", "-"),
    "DySpec by head + SpecDec++": ("black", "-"),
}
SPEED = "speed, c = 0.02"


def main(figures: Path, picture: Path) -> None:
    matplotlib.rcParams.update({"svg.fonttype": "none", "font.size": 9, "svg.hashsalt": "draftwood"})
    results: dict[str, dict[str, Any]] = json.loads(figures.read_text())["results"]
    settings = [label.split(", ") for label in results]
    temperatures = list(dict.fromkeys(temperature for temperature, _ in settings))
    canvas = Figure(figsize=(4 * len(temperatures), 6.4), layout="constrained")
    axes = canvas.subplots(2, len(temperatures), sharex=True, sharey="row", squeeze=False)
    for column, temperature in enumerate(temperatures):
        budgets = [int(budget.split()[0]) for name, budget in settings if name == temperature]
        for method, (colour, line) in METHODS.items():
            rows = [results[f"{temperature}, {budget} tokens"].get(method) for budget in budgets]
            known = [(budget, row) for budget, row in zip(budgets, rows, strict=True) if row is not None]
            if not known:
                continue
            x = [budget for budget, _ in known]
            length = [row["tokens_per_target_pass"] for _, row in known]
            low, high = zip(*(row["interval_95"] for _, row in known), strict=True)
            axes[0, column].plot(x, length, line, color=colour, label=method, marker=".")
            axes[0, column].fill_between(x, low, high, color=colour, alpha=0.08)
            speed = [row["modelled_speed_up"]["0.02"] for _, row in known]
            axes[1, column].plot(x, speed, line, color=colour, marker=".")
        axes[0, column].set_title(temperature)
        axes[1, column].set_xlabel("budget, tokens")
        axes[1, column].set_xscale("log", base=2)
        axes[1, column].set_xticks(budgets, [str(budget) for budget in budgets])
    axes[0, 0].set_ylabel("tokens per target pass")
    axes[1, 0].set_ylabel(f"modelled {SPEED}")
    canvas.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    canvas.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
