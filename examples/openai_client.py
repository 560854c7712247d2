"""Start a server and use it with OpenAI's Python client. Needs `pip install openai`.

python examples/openai_client.py [BUNDLE]
"""

import subprocess
import sys

from openai import OpenAI

bundle = sys.argv[1] if len(sys.argv) > 1 else "bundles/smollm2"
command = [sys.executable, "-m", "draftwood", "serve", bundle, "--port", "0"]

with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
    try:
        assert server.stdout is not None
        line = server.stdout.readline()  # draftwood: model 'smollm2' at http://127.0.0.1:8000/v1, …
        client = OpenAI(base_url=line.split(" at ")[1].split(",")[0], api_key="none")
        model = client.models.list().data[0].id
        stream = client.completions.create(
            model=model, prompt="import os\n", max_tokens=48, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )  # fmt: skip
        for event in stream:
            if event.choices:
                print(event.choices[0].text, end="", flush=True)
            elif event.usage is not None and event.usage.completion_tokens_details is not None:
                accepted = event.usage.completion_tokens_details.accepted_prediction_tokens
                print(f"\n\n{accepted} of {event.usage.completion_tokens} tokens were proposed by the draft")
        plain = client.completions.create(
            model=model, prompt="import os\n", max_tokens=48, temperature=0, extra_body={"speculative": False}
        )
        print(f"without the draft: {plain.choices[0].text!r}")
    finally:
        server.terminate()
