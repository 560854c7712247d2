"""Draw the results of `methods.py`: tokens per target pass, and the modelled speed-up, against the budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.tools.svg import new_figure, save_svg

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


def draw(results: Mapping[str, Mapping[str, Any]], picture: Path) -> None:
    """results: by temperature and budget, then by method, as `methods.py` writes them."""
    settings = [label.split(", ") for label in results]
    temperatures = list(dict.fromkeys(temperature for temperature, _ in settings))
    canvas = new_figure(4 * len(temperatures), 6.4)
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
    save_svg(canvas, picture)
