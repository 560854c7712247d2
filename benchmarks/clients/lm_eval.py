"""lm-eval against the server: a multiple-choice task, through `local-completions` and through lm-eval's own `hf` model
of the same checkpoint; the log-likelihoods of both are compared.

python -m benchmarks.clients.lm_eval bundles/smollm2 smollm2 --lm-eval venv/bin/lm_eval --output benchmarks/results

lm-eval is installed apart (`pip install 'lm-eval[api]'`), and the bundle is an fp32 one of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.clients.environment import served, version_of
from benchmarks.tools.record import add_output, write_results

TASK = """task: draftwood_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
QUESTIONS = Path(__file__).with_name("questions.jsonl")
TOLERANCE = 1e-3  # of a log-likelihood, in nats


class Evaluation(NamedTuple):
    """Scores by name; for every choice of every question, in order, the log-likelihood in nats and whether it is the
    greedy continuation."""

    scores: dict[str, float]
    likelihoods: list[tuple[float, bool]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("checkpoint", type=Path, help="the target's Hugging Face folder")
    parser.add_argument("--lm-eval", type=Path, required=True, help="lm_eval of another environment")
    add_output(parser, "clients_lm_eval")
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "choice.yaml").write_text(TASK.format(questions=QUESTIONS.resolve()))
        program = [str(arguments.lm_eval), "--include_path", name, "--tasks", "draftwood_choice", "--log_samples"]
        evaluate(program, "hf", f"pretrained={checkpoint},dtype=float32", folder / "hf")
        with served(arguments.bundle) as url:
            options = f"model={arguments.bundle.name},base_url={url}/completions,tokenizer={checkpoint}"
            evaluate(program, "local-completions", options, folder / "served")
        figures = compared(evaluation(folder / "hf"), evaluation(folder / "served"))
    lm_eval = version_of("lm-eval", arguments.lm_eval.with_name("python"))
    print(json.dumps(figures, indent=1))
    write_results(arguments.output, arguments.name, {"lm_eval": lm_eval, **figures})
    if figures["largest difference"] > TOLERANCE or figures["hf"] != figures["served"]:
        sys.exit("the likelihoods differ")


def evaluate(program: Sequence[str], model: str, options: str, output: Path) -> None:
    """Let lm-eval write a model's scores and samples into a folder."""
    command = [*program, "--model", model, "--model_args", options, "--output_path", str(output), "--batch_size", "1"]
    subprocess.run(command, check=True)


def evaluation(output: Path) -> Evaluation:
    """What lm-eval has written into a folder."""
    (scores,), (samples,) = output.rglob("results_*.json"), output.rglob("samples_*.jsonl")
    lines = sorted((json.loads(line) for line in samples.read_text().splitlines()), key=lambda line: line["doc_id"])
    values = json.loads(scores.read_text())["results"]["draftwood_choice"]
    return Evaluation(
        {name: value for name, value in values.items() if name.startswith("acc") and "stderr" not in name},
        [(float(value), str(greedy) == "True") for line in lines for value, greedy in line["filtered_resps"]],
    )


def compared(hf: Evaluation, served: Evaluation) -> dict[str, Any]:
    """The scores of both, and how far their likelihoods differ."""
    pairs = list(zip(hf.likelihoods, served.likelihoods, strict=True))
    return {
        "likelihoods": len(pairs),
        "largest difference": max(abs(theirs - ours) for (theirs, _), (ours, _) in pairs),
        "tolerance": TOLERANCE,
        "equal greedy flags": sum(theirs == ours for (_, theirs), (_, ours) in pairs),
        "hf": hf.scores,
        "served": served.scores,
    }


if __name__ == "__main__":
    main()
