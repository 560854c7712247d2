"""Runs an exported model with OpenVINO GenAI, in its own environment: JSON lines on stdin and stdout.

    python openvino_program.py FOLDER THREADS

It uses the standard library and OpenVINO's packages only. Arithmetic and cache have the defaults of this processor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai

CHUNK = 64  # rows of a pass over a text


class Program:
    """Loads what is asked for first: the pipeline for texts, the network for logits."""

    def __init__(self, folder: str, threads: int) -> None:
        self._folder, self._settings = folder, {"INFERENCE_NUM_THREADS": threads}
        self._pipeline: Any = None
        self._network: Any = None

    def text(self, request: dict[str, Any]) -> dict[str, Any]:
        """Greedy tokens, and tokens per second after the first by the library's own clock."""
        if self._pipeline is None:
            self._pipeline = openvino_genai.LLMPipeline(self._folder, "CPU", **self._settings)
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = request["tokens"], False
        ids = np.array([request["ids"]], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        result = self._pipeline.generate(inputs, config)
        milliseconds = result.perf_metrics.get_tpot().mean
        return {"tokens": [int(token) for token in result.tokens[0]], "speed": 1000 / milliseconds}

    def logits(self, request: dict[str, Any]) -> dict[str, Any]:
        """The network that the pipeline runs, over a text from an empty cache; [tokens, V] goes to a file."""
        if self._network is None:
            core = openvino.Core()
            self._network = core.compile_model(f"{self._folder}/openvino_model.xml", "CPU", self._settings)
        run, ids, found = self._network.create_infer_request(), request["ids"], []
        run.reset_state()
        for start in range(0, len(ids), CHUNK):
            chunk = np.array([ids[start : start + CHUNK]], np.int64)
            end = start + chunk.shape[1]
            feeds = {"input_ids": chunk, "attention_mask": np.ones((1, end), np.int64)}
            feeds |= {"position_ids": np.arange(start, end)[None], "beam_idx": np.zeros(1, np.int32)}
            known = {name for port in self._network.inputs for name in port.get_names()}
            run.infer({name: value for name, value in feeds.items() if name in known})
            found.append(np.array(run.get_tensor("logits").data[0], np.float32))
        np.save(request["file"], np.concatenate(found))
        return {}

    def bits(self, request: dict[str, Any]) -> dict[str, Any]:
        """Bits of a weight in all matrices: codes, zero points and scales together."""
        model = openvino.Core().read_model(f"{self._folder}/openvino_model.xml")
        constants = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
        codes = [c for c in constants if c.get_element_type().is_integral() and c.get_element_type().bitwidth <= 8]
        large = [c for c in codes if np.prod(c.get_output_shape(0)) > 4096]
        weights = sum(int(np.prod(c.get_output_shape(0))) for c in large if is_weight(c))
        parts = {c.get_friendly_name(): size_in_bits(c) for c in large}
        for c in large:
            for port in c.output(0).get_target_inputs():
                parts |= {name: size for name, size in scales_of(port.get_node())}
        return {"bits": sum(parts.values()) / weights}


def size_in_bits(constant: Any) -> int:
    return int(np.prod(constant.get_output_shape(0))) * int(constant.get_element_type().bitwidth)


def is_weight(constant: Any) -> bool:
    return "zero_point" not in constant.get_friendly_name()


def scales_of(node: Any) -> list[tuple[str, int]]:
    """Constants that the decompression behind these codes reads: Convert, Subtract (zero point), Multiply (scale)."""
    found = []
    while node.get_type_name() in ("Convert", "Subtract", "Multiply"):
        for index in range(node.get_input_size()):
            source = node.input_value(index).get_node()
            if source.get_type_name() == "Convert":
                source = source.input_value(0).get_node()
            if source.get_type_name() == "Constant":
                found.append((source.get_friendly_name(), size_in_bits(source)))
        following = node.output(0).get_target_inputs()
        if len(following) != 1:
            break
        node = next(iter(following)).get_node()
    return found


if __name__ == "__main__":
    program = Program(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(program, asked["kind"])(asked)), flush=True)
