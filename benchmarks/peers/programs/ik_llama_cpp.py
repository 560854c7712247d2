"""ik_llama.cpp, a fork of llama.cpp with other kernels: its llama-server, asked as llama.cpp's is.

It reads what llama.cpp's converter writes, so the environment of llama.cpp must be there. Weights are repacked for its
kernels when a server starts, and flash attention is on, which is its default. Its server returns no token ids; the text
is encoded again after the clock has stopped. Where a prompt recurs, its draft proposes the text that it wrote last, so
it writes another text before each one that counts.
"""

from __future__ import annotations

import http.client
import json
from typing import Any

from benchmarks.peers.programs.llama_cpp import LlamaCpp, make_converter, post
from benchmarks.peers.protocol import PLAIN, Generation, serve, split_method

UNKNOWN = -1  # in the place of a token that the text does not tell
OTHER = [0] * 8  # prompt of the text between. The server ends where its draft has read a token of this prompt before


class IkLlamaCpp(LlamaCpp):
    def generate(self, method: str, prompts: list[list[int]], max_tokens: int) -> Generation:
        if method in self._servers and method != PLAIN:
            connection = self._servers[method][0]
            connection.close()  # the server closes idle connections
            connection.connect()
            post(connection, "/completion", json.dumps(self._request(OTHER, len(OTHER))))
        return super().generate(method, prompts, max_tokens)

    def _read_tokens(self, connection: http.client.HTTPConnection, reply: dict[str, Any]) -> list[int]:
        tokens: list[int] = post(connection, "/tokenize", json.dumps({"content": reply["content"]}))["tokens"]
        count: int = reply["tokens_predicted"]
        return [*tokens, *[UNKNOWN] * (count - len(tokens))][:count]

    def _arguments(self, method: str) -> list[object]:
        kind, length = split_method(method)
        common = ["-rtr", "-cram", 0]
        if kind == "draft":
            # Proposals of a fixed length, as those of the other peers.
            return [*common, "-md", self._models / "draft.gguf", "--draft-max", length, "--draft-p-min", 0]
        if kind != PLAIN:
            raise ValueError(f"method {method!r} is not one of {', '.join(self.methods)}")
        return common

    def _converter(self) -> list[str]:
        home = self._options.work.parent / "llama.cpp"
        return make_converter(home / "venv" / "bin" / "python", home)


if __name__ == "__main__":
    serve(IkLlamaCpp)
